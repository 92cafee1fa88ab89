"""A small dataset with a graph, and the command `gids bench`, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_schema import faults

from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph

Bench = Callable[..., tuple[int, str, dict[str, Any]]]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/bench-schema.json").read_text())


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    write_graph(
        directory / "graph", GraphSpec(node_count=3000, degree=8, dim=1024, train_count=600, val_count=100)
    )
    assert main(["convert", str(directory / "graph"), str(directory / "graph.gids"), "--quiet"]) == 0
    return directory / "graph.gids"


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Run `gids bench ARGS --json FILE`. Returns (exit status, output, JSON), and checks the JSON."""

    def run(*args: object) -> tuple[int, str, dict[str, Any]]:
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        status = main(["bench", *map(str, args), "--json", str(path)])
        said = capsys.readouterr()
        report = json.loads(path.read_text()) if path.exists() else {}
        if report:
            assert faults(report, SCHEMA) == []
        return status, said.out + said.err, report

    return run
