"""`gids quickstart`: its output, and that it removes its files. tests/bench_command/test_epoch.py trains."""

import json
import re
from importlib.util import find_spec

import pytest
from epoch_results import make_up

from gids.bench.isolation import FreshProcessError
from gids.bench.sides import FRAMEWORKS
from gids.cli import main
from gids.cli.quickstart import EXAMPLES

TINY = ["--nodes", "3000", "--dim", "1024", "--batches", "6", "--batch-size", "16"]


@pytest.mark.parametrize(
    ("framework", "code", "rows"),
    [
        ("dgl", r"    loader = gids\.dgl\.DataLoader\(.*gids=", lambda n: n["blocks"][0].srcdata["feat"]),
        ("pyg", r"    loader = gids\.pyg\.NeighborLoader\(data, \[3, 4\], \"train\"", lambda n: n["batch"].x),
        ("torch", r"    loader = gids\.NodeLoader\(source, \"t", lambda n: n["minibatch"].features["feat"]),
    ],
)
def test_the_table_has_a_column_per_side_and_the_code_follows(
    tmp_path, monkeypatch, capsys, framework, code, rows
):
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    make_up(monkeypatch)
    options = ["--with", framework, "--fanouts", "4,3", "--keep", "--dir", str(tmp_path)]
    assert main(["quickstart", *TINY, *options]) == 0
    out, err = capsys.readouterr()
    for line in (
        r"^side +gids +stock, MADV_RANDOM +stock$",
        r"epoch( +2\.00 s){3}",
        r"training( +300 ms){3}",
        r"rows/s( +300){3}",
        r"hits %( +25\.0){3}",
        r"^gids loads 1\.0 x as many rows per second as stock, MADV_RANDOM",
        code,
    ):
        assert re.search(line, out, re.M), line
    assert re.findall(r"^\$ gids (\w+)", err, re.M) == ["generate", "bench"]
    [directory] = tmp_path.iterdir()
    assert f"files kept in {directory}" in err
    lines = EXAMPLES[framework].format(path=str(directory / "graph.gids"), fanouts=[3, 3], batch_size=16)
    assert len(lines.strip().splitlines()) <= 6
    names = {}
    exec(lines, names)
    assert rows(names).shape[1:] == (1024,)


@pytest.mark.parametrize(
    ("outcomes", "status", "said"),
    [({}, 0, ""), ({"gids": FreshProcessError("failed\nOSError: no disk")}, 2, "OSError: no disk")],
)
def test_the_json_is_all_that_is_printed_and_no_file_is_left(
    tmp_path, monkeypatch, capsys, outcomes, status, said
):
    make_up(monkeypatch, **outcomes)
    assert main(["quickstart", *TINY, "--with", "torch", "--json", "--dir", str(tmp_path)]) == status
    out, err = capsys.readouterr()
    assert said in err
    assert list(tmp_path.iterdir()) == []
    if not status:
        report = json.loads(out)
        assert report["subject"]["feature_bytes"] == 3000 * 4096
        assert report["figures"][0]["setting"] == {"side": "gids"}


@pytest.mark.parametrize("error", [SystemExit(143), RuntimeError("broken")])
def test_an_interrupted_run_leaves_nothing_behind(error, monkeypatch, tmp_path):
    from gids.convert import synthetic

    def fail(*_):
        raise error

    monkeypatch.setattr(synthetic.Features, "read_into", fail)
    try:
        status = main(["quickstart", *TINY, "--dir", str(tmp_path)])
    except SystemExit as stop:
        status = stop.code
    assert status in (2, 143)
    assert list(tmp_path.iterdir()) == []
