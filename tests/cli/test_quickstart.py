"""`gids quickstart`: its output, and that it removes its files."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from epoch_results import epoch_result, train_here

from gids.cli import main
from gids.cli.quickstart import example
from gids.measure import sides
from gids.measure.isolation import FreshProcessError

TINY = ["--nodes", "3000", "--dim", "1024", "--batches", "6", "--batch-size", "16", "--fanouts", "3,3"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run with --keep: its directory, output and exit status. Only gids trains, in this process: a test
    of bench/epoch.py trains on all sides."""
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    parent = tmp_path_factory.mktemp("quickstart")
    out, err, run_side = io.StringIO(), io.StringIO(), sides.run_side

    def run(config, **options):
        return run_side(config, **options) if config.side == "gids" else epoch_result(config.side)

    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        patch.setattr(sides, "run_side", run)
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        status = main(["quickstart", *TINY, "--json", "--keep", "--dir", str(parent)])
    [directory] = parent.iterdir()
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue(), directory=directory)


@pytest.mark.slow
def test_gids_trains_on_the_graph(real):
    assert real.status == 0, real.err
    report = json.loads(real.out)
    metrics = {figure["setting"]["side"]: figure["metrics"] for figure in report["figures"]}
    assert list(metrics) == ["gids", "stock, MADV_RANDOM", "stock"]
    assert metrics["gids"]["batches"]["median"] == 6
    assert 0 < metrics["gids"]["read_bytes"]["median"] < 100e6
    assert report["subject"]["feature_bytes"] == 3000 * 4096
    assert "gids loads " in report["answers"][0]


@pytest.mark.slow
def test_the_commands_are_printed_and_keep_says_where(real):
    commands = re.findall(r"^\$ gids (\w+)", real.err, re.M)
    assert commands == ["generate", "convert", "bench"]
    assert f"files kept in {real.directory}" in real.err
    assert (real.directory / "graph.gids" / "manifest.json").exists()


@pytest.mark.slow
def test_the_six_printed_lines_load_the_dataset(real):
    lines = example(str(real.directory / "graph.gids"), [3, 3], 16)
    assert len(lines.strip().splitlines()) == 6
    names = {}
    exec(lines, names)
    blocks = names["blocks"]
    assert blocks[0].srcdata["feat"].shape == (blocks[0].num_src_nodes(), 1024)
    assert blocks[-1].dstdata["label"].shape == (blocks[-1].num_dst_nodes(),)


@pytest.fixture
def quick(monkeypatch, capsys, tmp_path):
    """A function that runs `gids quickstart` with sides that do not train: (status, output, errors).

    outcomes: by side, an error to raise, or values of the result.
    """

    def run(*options, **outcomes):
        def known(config, **_):
            outcome = outcomes.get(config.side, {})
            if isinstance(outcome, Exception):
                raise outcome
            return epoch_result(config.side, **outcome)

        monkeypatch.setattr(sides, "run_side", known)
        monkeypatch.setattr(sides, "why_no_limit", lambda: "")
        status = main(["quickstart", *TINY, *options, "--dir", str(tmp_path)])
        assert list(tmp_path.iterdir()) == []  # also after an error
        return status, *capsys.readouterr()

    return run


def test_the_table_has_a_column_per_side_and_the_code_follows(quick):
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    status, out, _ = quick()
    assert status == 0
    for line in (
        r"side  +gids  +stock, MADV_RANDOM  +stock",
        r"sampling( +300 ms){3}",
        r"waiting( +300 ms){3}",
        r"training( +300 ms){3}",
        r"epoch( +2\.00 s){3}",
        r"rows/s( +300){3}",
        r"hits %( +25\.0){3}",
        r"^gids loads 1\.0 x as many rows per second as stock, MADV_RANDOM",
        r"    loader = gids\.dgl\.DataLoader\(.*gids=source",
    ):
        assert re.search(line, out, re.M), line


def test_gids_that_fails_is_an_error(quick):
    pytest.importorskip("gids.dgl", exc_type=ImportError)
    status, out, err = quick("--json", gids=FreshProcessError("failed (exit status 1)\nOSError: no disk"))
    assert (status, out) == (2, "")
    assert "OSError: no disk" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143), RuntimeError("broken")])
def test_an_interrupted_run_leaves_nothing_behind(error, monkeypatch, tmp_path):
    from gids.convert import synthetic

    def fail(directory, *_, **__):
        directory.mkdir()
        (directory / "feat.npy").write_bytes(b"1")
        raise error

    monkeypatch.setattr(synthetic, "write_graph", fail)
    try:
        status = main(["quickstart", *TINY, "--dir", str(tmp_path)])
    except SystemExit as stop:
        status = stop.code
    assert status in (2, 130, 143)
    assert list(tmp_path.iterdir()) == []


def test_missing_dgl_is_reported_with_the_command_to_install_it(monkeypatch, tmp_path, refused):
    import importlib.util
    import sys

    for name in [name for name in sys.modules if name == "gids.dgl" or name.startswith("gids.dgl.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dgl", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas" in refused(
        "quickstart", *TINY, "--dir", tmp_path
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size: '0' is not a whole number of 1 or more"),
        (["--window", "23"], "--window: '23' is not a whole number from 0 to 22"),
        (["--seconds", "inf"], "--seconds: 'inf' is not a number of seconds of 0 or more (0: no limit)"),
        (["--fanouts", "4,x"], "--fanouts: '4,x' is not a list of numbers of 1 or more"),
    ],
)
def test_options_out_of_range_are_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["quickstart", *TINY, "--dir", str(tmp_path), *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
