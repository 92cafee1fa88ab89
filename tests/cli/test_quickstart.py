"""`gids quickstart`: its output, the rows of both sides, and that it removes its files."""

import contextlib
import io
import json
import re
from types import SimpleNamespace

import pytest
from epoch_results import epoch_result

from gids.bench.quickstart import example
from gids.cli import main, quickstart
from gids.measure import sides
from gids.measure.isolation import FreshProcessError, FreshProcessOutOfMemory, FreshProcessTimeout

TINY = ["--nodes", "3000", "--dim", "1024", "--batches", "6", "--batch-size", "16", "--fanouts", "3,3"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One real run with --keep: its directory, output and exit status."""
    parent = tmp_path_factory.mktemp("quickstart")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["quickstart", *TINY, "--json", "--keep", "--dir", str(parent)])
    [directory] = parent.iterdir()
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue(), directory=directory)


@pytest.mark.slow
def test_both_sides_load_the_rows_of_the_source_with_the_same_memory(real):
    assert real.status == 0, real.err
    result = json.loads(real.out)
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
    limits = [result[side]["memory_limit_bytes"] for side in ("gids", "stock")]
    if result["why_no_memory_limit"]:
        assert limits == [None, None]
    else:
        assert abs(limits[0] - limits[1]) < 60e6
        headroom = [result[side]["headroom_bytes"] for side in ("gids", "stock", "stock_without_advice")]
        assert headroom[0] == headroom[1] == headroom[2] > 16 << 20


@pytest.mark.slow
def test_both_sides_start_with_a_cold_page_cache(real, on_disk):
    result = json.loads(real.out)
    assert all(result[side]["cached_before"] < 0.01 for side in ("gids", "stock"))


@pytest.mark.slow
def test_progress_names_the_steps_and_keep_says_where(real):
    steps = re.findall(r"^(\w+) .*\.\.\. \d+\.\d s$", real.err, re.M)
    assert steps[:5] == ["starting", "making", "converting", "training", "training"]
    for step in ("making a graph", "training with gids"):
        assert re.search(rf"^{step}.* \.\.\.$", real.err, re.M)  # when it begins
    assert f"files kept in {real.directory}" in real.err
    assert (real.directory / "graph.gids" / "manifest.json").exists()


@pytest.mark.slow
def test_the_six_printed_lines_load_the_dataset(real):
    lines = example(str(real.directory / "graph.gids"), (3, 3), 16)
    assert len(lines.strip().splitlines()) == 6
    names = {}
    exec(lines, names)
    blocks = names["blocks"]
    assert blocks[0].srcdata["feat"].shape == (blocks[0].num_src_nodes(), 1024)
    assert blocks[-1].dstdata["label"].shape == (blocks[-1].num_dst_nodes(),)


@pytest.fixture
def quick(monkeypatch, capsys, tmp_path):
    """A function that runs `gids quickstart` with sides that do not train: (status, output, errors).

    outcomes: by side, an error to raise, or values of the result. asked: how run_side was called.
    """

    def run(*options, no_limit="", **outcomes):
        def known(config, *, limited=True, **_):
            run.asked.append((config, limited))
            plain = config.side == "stock" and not config.random_access
            outcome = outcomes.get("stock_without_advice" if plain and limited else config.side, {})
            if isinstance(outcome, Exception):
                raise outcome
            return epoch_result(config.side, **outcome)

        monkeypatch.setattr(sides, "run_side", known)
        monkeypatch.setattr(sides, "why_no_limit", lambda: no_limit)
        status = main(["quickstart", *TINY, *options, "--dir", str(tmp_path)])
        assert list(tmp_path.iterdir()) == []  # also after an error
        return status, *capsys.readouterr()

    run.asked = []
    return run


def test_the_table_has_all_sides_and_the_code(quick):
    status, out, _ = quick()
    assert status == 0
    for line in (
        "gids  +stock DGL +no advice",
        r"sampling( +0\.30 s){3}",
        r"waiting for features( +0\.30 s){3}",
        r"training( +0\.30 s){3}",
        r"whole epoch( +2\.00 s){3}",
        r"rows/s( +300){3}",
        r"MB/s read( +0){3}",
        r"hit ratio( +25\.0%){3}",
        r"training accuracy( +50\.0%){3}",
        r"validation accuracy( +75\.0%){3}",
        r"^gids is 1\.0 x as fast as stock DGL\.",
        r"    loader = gids\.dgl\.DataLoader\(.*gids=source",
    ):
        assert re.search(line, out, re.M), line


def test_stock_that_is_killed_for_memory_leaves_the_result_of_gids(quick):
    reason = "needed more than 578 MB of memory and was killed by the kernel"
    error = FreshProcessOutOfMemory("gids.measure.epoch was killed", reason)
    status, out, err = quick(stock=error, stock_without_advice=error)
    assert status == 0
    text = " ".join(out.split())
    assert f"Stock DGL {reason}." in text
    assert f"Stock DGL without MADV_RANDOM {reason}." in text
    assert f"  stock DGL {reason}\n" in err
    assert re.search(r"^whole epoch +\d+\.\d\d s$", out, re.M)  # one column
    status, out, _ = quick("--json", stock=error, stock_without_advice=error)
    found = json.loads(out)
    assert (status, found["gids"]["batches"]) == (0, 6)
    assert [found["stock"], found["stock_without_advice"], found["speed_up"]] == [None, None, None]
    assert found["why_missing"]["stock"] == f"stock DGL {reason}"


def test_stock_without_advice_that_fails_is_omitted(quick):
    error = FreshProcessTimeout("too long", "did not end within 60 s and was stopped")
    status, out, _ = quick("--json", stock_without_advice=error)
    found = json.loads(out)
    assert (status, found["stock_without_advice"]) == (0, None)
    assert "did not end within 60 s" in found["why_missing"]["stock_without_advice"]
    assert found["speed_up"] > 0


def test_gids_that_fails_is_an_error(quick):
    error = FreshProcessError("module failed (exit status 1)\nOSError: no disk")
    status, out, err = quick("--json", gids=error)
    assert (status, out) == (2, "")
    assert "OSError: no disk" in err


@pytest.mark.parametrize("side", ["gids", "stock", "stock_without_advice"])
def test_wrong_rows_are_exit_status_1(side, quick):
    assert quick(**{side: {"wrong_rows": 1}})[0] == 1


def test_a_side_that_was_stopped_is_compared_by_rows_per_second(quick):
    stock = {"seconds": 60.0, "rows": 300, "batches": 3}
    text = " ".join(quick(stock=stock)[1].split())
    assert "stock DGL, 3 of 6" in text
    assert "gids is 60.0 x as fast, by rows/s, as stock DGL." in text
    assert "Stock DGL was stopped after 60 s and 3 of 6 minibatches, so compare rows/s." in text
    assert json.loads(quick("--json", stock=stock)[1])["speed_up"] == pytest.approx(60)


@pytest.mark.parametrize(("option", "expected"), [([], [60, 60]), (["--seconds", "7"], [7, 7])])
def test_both_sides_stop_after_a_minute_or_as_given(option, expected, quick):
    quick(*option)
    assert [config.most_seconds for config, _ in quick.asked[:2]] == expected


def test_without_a_memory_limit_the_text_says_so(quick):
    text = " ".join(quick(no_limit="no memory control group: Permission denied")[1].split())
    assert "Memory was not limited (no memory control group: Permission denied" in text
    asked = [(config.side, config.random_access, limited) for config, limited in quick.asked]
    assert asked == [("gids", True, False), ("stock", False, False)]


def test_the_graph_is_smaller_if_the_disk_writes_slowly(monkeypatch, tmp_path, capsys):
    args = SimpleNamespace(dir=tmp_path / "new", dim=1024)
    assert quickstart._nodes_by_write_speed(args) in range(150_000, 300_001)
    capsys.readouterr()
    monkeypatch.setattr(quickstart, "WRITE_SECONDS", 1e-6)
    assert quickstart._nodes_by_write_speed(args) == 150_000
    message = capsys.readouterr().err
    assert re.search(
        r"new is slow to write \(.*/s\): the graph has 150,000 nodes instead of 300,000;", message
    )
    monkeypatch.setattr(quickstart, "WRITE_SECONDS", 1e9)
    assert quickstart._nodes_by_write_speed(args) == 300_000
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


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


def test_a_full_disk_is_reported_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["quickstart", *TINY, "--dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert re.search("MB are needed and 1.0 kB are free: give another --dir, or fewer --nodes", message)
    assert list(tmp_path.iterdir()) == []


def test_new_folders_are_removed_without_keep(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["quickstart", *TINY, "--dir", str(tmp_path / "a/b")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_dgl_is_reported_with_the_command_to_install_it(monkeypatch, tmp_path, capsys):
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
        (["--batch-size", "0"], "--batch-size: '0' is not a whole number of 1 or more"),
        (["--window", "23"], "--window: '23' is not a whole number from 0 to 22"),
        (["--seconds", "-1"], "--seconds: '-1' is not a number of seconds of 0 or more (0: no limit)"),
        (["--seconds", "inf"], "--seconds: 'inf' is not a number of seconds of 0 or more (0: no limit)"),
        (["--fanouts", "4,x"], "--fanouts: '4,x' is not a list of numbers of 1 or more"),
    ],
)
def test_options_out_of_range_are_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["quickstart", *TINY, "--dir", str(tmp_path), *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_refused(tmp_path, capsys):
    assert main(["quickstart", *TINY, "--dir", str(tmp_path), "--memory", "1MB"]) == 2
    assert "--memory 1000000 is too small" in (message := capsys.readouterr().err)
    assert "give 101 MB or more" in message
