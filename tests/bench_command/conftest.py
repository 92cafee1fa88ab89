"""A small dataset with a graph, and the command `gids bench`, run in this process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import gids
from json_schema import faults

from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/bench-schema.json").read_text())


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    write_graph(
        directory / "graph", GraphSpec(node_count=3000, degree=8, dim=1024, train_count=600, val_count=100)
    )
    gids("convert", directory / "graph", directory / "graph.gids", "--quiet")
    return directory / "graph.gids"


@pytest.fixture
def bench(tmp_path, capsys):
    """Run `gids bench ARGS --json FILE`; its output and its JSON, which is checked."""

    def run(*args, status=0):
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        ended = main(["bench", *map(str, args), "--json", str(path)])
        out, err = capsys.readouterr()
        assert ended == status, out + err
        report = json.loads(path.read_text()) if path.exists() else {}
        if report:
            assert faults(report, SCHEMA) == []
        return out + err, report

    return run


@pytest.fixture
def plot(tmp_path):
    """The option of a picture, which is there afterwards; nothing without matplotlib."""
    path = tmp_path / "picture.png"
    options = ("--plot", path) if find_spec("matplotlib") else ()
    yield options
    assert not options or path.read_bytes().startswith(b"\x89PNG")
