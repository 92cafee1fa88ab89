"""`gids quickstart`: its output, and that it removes its files."""

import json
import re
from importlib.util import find_spec

import pytest
from epoch_results import make_up, train_here

from gids.bench.isolation import FreshProcessError
from gids.bench.sides import FRAMEWORKS
from gids.cli import main
from gids.cli.quickstart import EXAMPLES

TINY = ["--nodes", "3000", "--dim", "1024", "--batches", "6", "--batch-size", "16", "--fanouts", "3,3"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_sides_train_and_the_printed_lines_load_the_dataset(tmp_path, monkeypatch, capsys, framework):
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    train_here(monkeypatch)
    options = ["--with", framework, "--json", "--keep", "--dir", str(tmp_path)]
    assert main(["quickstart", *TINY, *options]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    metrics = {figure["setting"]["side"]: figure["metrics"] for figure in report["figures"]}
    assert list(metrics) == ["gids", "stock, MADV_RANDOM", "stock"]
    assert metrics["gids"]["batches"] == 6
    assert report["subject"]["feature_bytes"] == 3000 * 4096
    assert "gids loads " in report["answers"][0]
    assert re.findall(r"^\$ gids (\w+)", err, re.M) == ["generate", "bench"]
    [directory] = tmp_path.iterdir()
    assert f"files kept in {directory}" in err
    lines = EXAMPLES[framework].format(path=str(directory / "graph.gids"), fanouts=[3, 3], batch_size=16)
    assert len(lines.strip().splitlines()) <= 6
    names = {}
    exec(lines, names)
    if framework == "dgl":
        blocks = names["blocks"]
        shapes = blocks[0].srcdata["feat"].shape, blocks[-1].dstdata["label"].shape
        counts = blocks[0].num_src_nodes(), blocks[-1].num_dst_nodes()
    elif framework == "pyg":
        batch = names["batch"]
        shapes = batch.x.shape, batch.y[: batch.batch_size].shape
        counts = batch.num_nodes, len(batch.input_id)
    else:
        minibatch = names["minibatch"]
        shapes = minibatch.features["feat"].shape, minibatch.labels.shape
        counts = len(minibatch.input_nodes), minibatch.blocks[-1].num_dst
    assert shapes == ((counts[0], 1024), (counts[1],))


@pytest.fixture
def quick(monkeypatch, capsys, tmp_path):
    """A function that runs `gids quickstart` with sides that do not train: (status, output, errors)."""

    def run(*options, **outcomes):
        make_up(monkeypatch, **outcomes)
        status = main(["quickstart", *TINY, *options, "--dir", str(tmp_path)])
        assert list(tmp_path.iterdir()) == []  # also after an error
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("framework", "code"),
    [
        ("dgl", r"    loader = gids\.dgl\.DataLoader\(.*gids=source"),
        ("pyg", r"    loader = gids\.pyg\.NeighborLoader\(data, \[3, 4\], \"train\""),
        ("torch", r"    loader = gids\.NodeLoader\(source, \"train\", \[4, 3\]"),
    ],
)
def test_the_table_has_a_column_per_side_and_the_code_follows(quick, framework, code):
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    status, out, _ = quick("--with", framework, "--fanouts", "4,3")
    assert status == 0
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


def test_gids_that_fails_is_an_error(quick):
    status, out, err = quick("--json", gids=FreshProcessError("failed (exit status 1)\nOSError: no disk"))
    assert (status, out) == (2, "")
    assert "OSError: no disk" in err


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
