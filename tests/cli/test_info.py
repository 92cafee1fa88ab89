"""`gids info`, `gids --help` and the exit of the command."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import gids

from gids.cli import main
from gids.write import DatasetWriter

TEXT = """\
DATASET
tables
  paper.feat  float32 20 x 50  10 pages of 512 B, 2 rows each  5.1 kB, 22% of a page unused
    2 rows of 200 B each
    DATASET/tables/paper.feat/shard-00.bin
  author.feat  bfloat16 3 x 300  3 pages of 1024 B, 1 row each  3.1 kB, 41% of a page unused
    one row of 600 B each
    DATASET/tables/author.feat/shard-00.bin
  paper.year  int64 20  1 page of 512 B, 64 rows each  512 B
    64 rows of 8 B each
    DATASET/tables/paper.year/shard-00.bin
  author.writes.paper.weight  float32 4  1 page of 512 B, 128 rows each  512 B
    128 rows of 4 B each
    DATASET/tables/author.writes.paper.weight/shard-00.bin
nodes
  paper  20  labels int64[20]  train 10, test 5  heat out-degree
  author  3  heat out-degree
relations
  author.writes.paper  4 edges  int64 in-edges, edge ids
  paper.cites.paper  100 edges  int32 in-edges, edge ids
"""


def test_info_prints_the_content(dataset, capsys):
    gids("info", dataset)
    said = capsys.readouterr().out
    assert re.sub("( B each)[,;].*", r"\1", said) == TEXT.replace("DATASET", str(dataset))
    gids("info", dataset, "--json")
    found = json.loads(capsys.readouterr().out)
    [page_size] = re.findall(r"    (one row.*)", said)
    assert found["tables"][1] == {
        "name": "author.feat",
        "kind": "node",
        "rows": 3,
        "shape": [300],
        "dtype": "bfloat16",
        "scale": None,
        "row_bytes": 600,
        "page_bytes": 1024,
        "rows_per_page": 1,
        "page_size": page_size,
        "pages": 3,
        "bytes": 3072,
        "unused_bytes": 1272,
        "ordered": False,
        "shards": [f"{dataset}/tables/author.feat/shard-00.bin"],
        "shard_bytes": [3072],
    }
    assert found["nodes"][0]["splits"] == {"train": 10, "test": 5}
    topology = {"index_dtype": "int64", "edge_ids": True, "times": None, "sorted_by": None}
    assert found["relations"][0] == {"type": ["author", "writes", "paper"], "edges": 4, "topology": topology}


def test_info_prints_shards_scales_and_relations_without_topology(tmp_path, capsys):
    for disk in ("ssd0", "ssd1"):
        (tmp_path / disk).mkdir()
    with DatasetWriter(tmp_path / "x.gids", stripe=[tmp_path / "ssd0", tmp_path / "ssd1"]) as writer:
        rows = torch.randn(50, 400)
        writer.write_table("node", "a\x1b[31m\nb", "x", rows, dtype=torch.int8, scale="row", page_bytes=4096)
        writer.add_nodes("c", 5)
        writer.write_table("edge", ("c", "to", "c"), "w", np.ones((9, 1)))
    gids("info", tmp_path / "x.gids", "--allow-dir", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    text = r"  a\x1b[31m\nb.x  int8 with a scale per row, 50 x 400  5 pages of 4096 B, 10 rows each  20.5 kB"
    assert text in lines, "names do not control the terminal"
    shards = [line.split(".bin  ")[1] for line in lines if ".bin" in line]
    assert shards[:2] == ["12.3 kB, 60.0%", "8.2 kB, 40.0%"]
    assert "  c.to.c  9 edges  no topology" in lines


def test_help_version_and_the_system_need_no_torch(tmp_path):
    code = """
import sys
from gids.cli import main

for words in ["--help"], ["--version"], ["info", "--system"]:
    try:
        main(words)
    except SystemExit:
        pass
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for expected in ("convert", "gids 0.", "direct I/O at ."):
        assert expected in done.stdout


def test_unexpected_error_prints_one_line_or_a_traceback_on_request(dataset, capsys, monkeypatch):
    monkeypatch.setattr("gids.cli.info.describe", lambda _: 1 / 0)
    assert main(["info", str(dataset)]) == 2
    said = "gids info: ZeroDivisionError: division by zero (GIDS_TRACEBACK=1 shows where)\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("GIDS_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["info", str(dataset)])
