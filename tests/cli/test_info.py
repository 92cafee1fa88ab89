"""`gids info`, `gids --help` and the exit of the command."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from commands import gids
from datasets import save_arrays

from gids.cli import main
from gids.write import DatasetWriter


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Whatever disk has the temporary directory: direct I/O of 512 bytes."""
    monkeypatch.setattr("gids.convert.layout._alignment_of", lambda _: 512)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("info")
    rng = np.random.default_rng(1)
    arrays = {
        "nodes/paper/feat": rng.standard_normal((40, 100), np.float32),
        "nodes/paper/label": rng.integers(0, 4, 40),
        "nodes/author/feat": rng.standard_normal((7, 2000), np.float32),
        "edges/author.writes.paper/edge_index": np.stack([rng.integers(0, 7, 60), rng.integers(0, 40, 60)]),
        "edges/paper.cites.paper/weight": np.ones((9, 1), np.float16),
    }
    save_arrays(folder / "source", **arrays)
    command = ["convert", str(folder / "source"), str(folder / "mag.gids"), "--page-bytes", "4096"]
    gids(*command, "--quiet")
    return folder / "mag.gids"


def test_info_prints_the_content(dataset, capsys):
    gids("info", dataset)
    assert (
        capsys.readouterr().out
        == f"""\
{dataset}
tables
  author.feat  float32 7 x 2000  7 pages of 8192 B, 1 row each  57.3 kB
    one row of 8000 B each, so a cache holds no unwanted rows
    {dataset}/tables/author.feat/shard-00.bin
  paper.feat  float32 40 x 100  4 pages of 4096 B, 10 rows each  16.4 kB
    10 rows of 400 B each; if rows are read at random, a cache serves more of them with --page-bytes 512
    {dataset}/tables/paper.feat/shard-00.bin
  paper.cites.paper.weight  float16 9 x 1  1 page of 4096 B, 2048 rows each  4.1 kB
    2048 rows of 2 B each; if rows are read at random, a cache serves more of them with --page-bytes 512
    {dataset}/tables/paper.cites.paper.weight/shard-00.bin
nodes
  author  7  heat out-degree
  paper  40  labels int64[40]  train 24, val 8, test 8
relations
  author.writes.paper  60 edges  int64 in-edges, edge ids
  paper.cites.paper  9 edges  no topology
"""
    )


def test_json_has_the_same_content(dataset, capsys):
    gids("info", dataset, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["tables"][0] == {
        "name": "author.feat",
        "kind": "node",
        "rows": 7,
        "shape": [2000],
        "dtype": "float32",
        "scale": None,
        "row_bytes": 8000,
        "page_bytes": 8192,
        "rows_per_page": 1,
        "page_size": "one row of 8000 B each, so a cache holds no unwanted rows",
        "pages": 7,
        "bytes": 57344,
        "unused_bytes": 1344,
        "ordered": False,
        "shards": [f"{dataset}/tables/author.feat/shard-00.bin"],
        "shard_bytes": [57344],
    }
    assert found["nodes"][1]["splits"] == {"train": 24, "val": 8, "test": 8}
    assert found["relations"][1] == {"type": ["paper", "cites", "paper"], "edges": 9, "topology": None}


def test_info_prints_the_size_of_each_shard(tmp_path, capsys):
    np.save(tmp_path / "feat.npy", np.zeros((50, 100), np.float32))
    disks = [str(tmp_path / d) for d in ("ssd0", "ssd1")]
    for disk in disks:
        os.mkdir(disk)
    path = str(tmp_path / "a.gids")
    command = ["convert", str(tmp_path / "feat.npy"), path, "--page-bytes", "4096", "--quiet"]
    gids(*command, "--stripe", *disks)
    allowed = [word for disk in disks for word in ("--allow-dir", disk)]
    gids("info", path, *allowed)
    shards = [line.split(".bin  ")[1] for line in capsys.readouterr().out.splitlines() if ".bin" in line]
    assert shards == ["12.3 kB, 60.0%", "8.2 kB, 40.0%"]


def test_path_without_dataset_prints_one_line(tmp_path, capsys):
    assert main(["info", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"gids info: {tmp_path} has no manifest.json; is it a gids dataset? `gids convert` makes one\n"
    )


def test_help_and_version_need_no_torch():
    code = (
        "import sys\nfrom gids.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    for argument, expected in (("--help", "convert"), ("--version", "gids 0.")):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, argument], capture_output=True, text=True, check=True
        )
        assert expected in done.stdout


def test_unexpected_error_prints_one_line_or_a_traceback_on_request(dataset, capsys, monkeypatch):
    monkeypatch.setattr("gids.cli.info.describe", lambda _: 1 / 0)
    assert main(["info", str(dataset)]) == 2
    assert (
        capsys.readouterr().err
        == "gids info: ZeroDivisionError: division by zero (GIDS_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv("GIDS_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["info", str(dataset)])


def test_ctrl_c_ends_without_a_traceback(dataset, capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gids.cli.info.describe", interrupt)
    assert main(["info", str(dataset)]) == 130
    assert capsys.readouterr().err == "\ngids info: interrupted\n"


def test_info_prints_the_scale(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.ones((9, 6), np.float32))
    command = ["convert", str(tmp_path / "x.npy"), str(tmp_path / "x.gids"), "--dtype", "int8", "--quiet"]
    gids(*command, "--page-bytes", "4096")
    capsys.readouterr()
    gids("info", tmp_path / "x.gids")
    said = capsys.readouterr().out.splitlines()[2]
    assert said == "  _N.feat  int8 with a scale per row, 9 x 6  1 page of 4096 B, 341 rows each  4.1 kB"
    gids("info", tmp_path / "x.gids", "--json")
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert (table["dtype"], table["scale"], table["row_bytes"]) == ("int8", "row", 12)


def test_names_do_not_control_the_terminal_and_an_empty_path_is_not_the_current_directory(tmp_path, capsys):
    with DatasetWriter(tmp_path / "x.gids") as writer:
        writer.add_nodes("a\x1b[31m\nb", 5)
    gids("info", tmp_path / "x.gids")
    assert r"  a\x1b[31m\nb  5" in capsys.readouterr().out.splitlines()
    for command in (["info", ""], ["convert", "", str(tmp_path / "y.gids")], ["verify", ""]):
        with pytest.raises(SystemExit):
            main(command)
        assert "'' is not a path" in capsys.readouterr().err
