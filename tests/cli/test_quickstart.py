"""`gids quickstart`: what it prints, that both sides see the right rows, that it leaves nothing behind."""

import json
import re
from types import SimpleNamespace

import pytest

from gids.cli import main, quickstart
from gids.quickstart import report

TINY = ["--nodes", "3000", "--dim", "1024", "--batches", "6", "--batch-size", "16", "--fanouts", "3,3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One real run with --keep: its directory, what it printed, and its status."""
    import contextlib
    import io

    parent = tmp_path_factory.mktemp("quickstart")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["quickstart", *TINY, "--json", "--keep", "--dir", str(parent)])
    [directory] = parent.iterdir()
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue(), directory=directory)


def test_both_sides_hand_over_rows_of_the_source(run):
    assert run.status == 0, run.err
    result = json.loads(run.out)
    for side in ("gids", "stock"):
        measured = result[side]
        assert measured["batches"] == 6
        assert measured["compared_rows"] > 300
        assert 0 < measured["val_accuracy"] <= 1
        assert measured["wrong_rows"] == 0
        assert set(measured["stages"]) == {"sampling", "planning", "reading", "gather", "training"}
        assert sum(measured["stages"].values()) <= measured["seconds"]
        assert 0 < measured["read_bytes"] < 100e6
    assert result["gids"]["loader"]["bytes_read"] > 0
    assert result["speed_up"] == pytest.approx(result["stock"]["seconds"] / result["gids"]["seconds"])


def test_both_sides_begin_with_a_cold_page_cache(run, on_disk):
    result = json.loads(run.out)
    assert all(result[side]["cached_before"] < 0.01 for side in ("gids", "stock"))


def test_both_sides_are_limited_alike_or_the_reason_is_given(run):
    result = json.loads(run.out)
    limits = [result[side]["memory_limit_bytes"] for side in ("gids", "stock")]
    if result["why_no_memory_limit"]:
        assert limits == [None, None]
    else:
        assert abs(limits[0] - limits[1]) < 60e6


def test_progress_names_the_steps_and_keep_says_where(run):
    steps = re.findall(r"^(\w+) .*\.\.\. \d+\.\d s$", run.err, re.M)
    assert steps[:4] == ["making", "converting", "training", "training"]
    assert f"kept: {run.directory}" in run.err
    assert (run.directory / "graph.gids" / "manifest.json").exists()


def test_the_six_printed_lines_load_the_dataset(run):
    lines = report.example(str(run.directory / "graph.gids"), (3, 3), 16)
    assert len(lines.strip().splitlines()) == 6
    names = {}
    exec(lines, names)
    blocks = names["blocks"]
    assert blocks[0].srcdata["feat"].shape == (blocks[0].num_src_nodes(), 1024)
    assert blocks[-1].dstdata["label"].shape == (blocks[-1].num_dst_nodes(),)


def test_the_table_has_both_sides_and_the_code(run, monkeypatch, capsys, tmp_path):
    from gids.quickstart import sides

    result = json.loads(run.out)

    def known(config, **_):
        plain = config.side == "stock" and not config.random_access
        name = "stock_without_advice" if plain and config.most_seconds else config.side
        return sides.EpochResult(**result[name])

    monkeypatch.setattr(sides, "run_side", known)
    assert main(["quickstart", *TINY, "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "gids  +stock DGL",
        r"sampling( +\d+\.\d\d s){2,3}",
        r"waiting for features( +\d+\.\d\d s){2,3}",
        r"training( +\d+\.\d\d s){2,3}",
        r"whole epoch( +\d+\.\d\d s){2,3}",
        r"rows/s( +[\d,]+){2}",
        r"MB/s read( +[\d,]+){2}",
        r"hit ratio( +[\d.]+%){2}",
        r"training accuracy( +[\d.]+%){2}",
        r"validation accuracy( +[\d.]+%){2}",
        r"^gids is \d+\.\d x as fast.*\.$",
        r"    loader = gids\.dgl\.DataLoader\(.*gids=store",
    ):
        assert re.search(line, out, re.M), line
    assert list(tmp_path.iterdir()) == []


def test_stock_that_gets_nowhere_without_advice_is_left_out(run, monkeypatch, capsys, tmp_path):
    from gids.quickstart import sides
    from gids.quickstart.isolation import FreshProcessTimeout

    result = json.loads(run.out)

    def patient(config, **_):
        if config.most_seconds:
            raise FreshProcessTimeout("too long")
        return sides.EpochResult(**result[config.side])

    monkeypatch.setattr(sides, "run_side", patient)
    monkeypatch.setattr(sides, "why_no_limit", lambda: "")
    assert main(["quickstart", *TINY, "--dir", str(tmp_path), "--json"]) == 0
    assert "stock_without_advice" not in json.loads(capsys.readouterr().out)


def test_without_a_memory_limit_the_text_says_so(run, monkeypatch, capsys, tmp_path):
    from gids.quickstart import sides

    result = json.loads(run.out)
    asked = []

    def known(config, limited, **_):
        asked.append((config.side, config.random_access, limited))
        return sides.EpochResult(**result[config.side])

    monkeypatch.setattr(sides, "run_side", known)
    monkeypatch.setattr(sides, "why_no_limit", lambda: "no memory control group: Permission denied")
    assert main(["quickstart", *TINY, "--dir", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Memory was not limited (no memory control group: Permission denied" in text
    assert asked == [("gids", True, False), ("stock", False, False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143), RuntimeError("broken")])
def test_an_interrupted_run_leaves_nothing_behind(error, monkeypatch, tmp_path):
    from gids.store import synthetic

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


def test_too_little_disk_is_told_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["quickstart", *TINY, "--dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert re.search("needs .* MB, and 1.0 kB are free: give another --dir, or fewer --nodes", message)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_it_made_go_when_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["quickstart", *TINY, "--dir", str(tmp_path / "a/b")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_dgl_is_told_with_the_cure(monkeypatch, tmp_path, capsys):
    import importlib.util
    import sys

    for name in [name for name in sys.modules if name == "gids.dgl" or name.startswith("gids.dgl.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dgl", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert main(["quickstart", *TINY, "--dir", str(tmp_path)]) == 2
    assert "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size 0: give 1 or more"),
        (["--window", "23"], "--window 23: give 0 to 22"),
        (["--workers", "-1"], "--workers -1"),
        (["--memory", "1MB"], "give 101 MB or more"),
        (["--classes", "0"], "classes must be 1 to"),
    ],
)
def test_options_out_of_range_are_refused(options, message, tmp_path, capsys):
    assert main(["quickstart", *TINY, "--dir", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_fanouts_that_are_none_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["quickstart", "--fanouts", "4,x"])
    assert "'4,x' is not a list of fanouts; write 3,3,3" in capsys.readouterr().err
