"""Which heat the loader gives to the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import in_edges
from open_loaders import feature_loader

from gids.heat import write_heat
from gids.store import FeatureStore
from gids.write import DatasetWriter

ROWS, LINES = 60, 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Papers cite papers and have tables of nodes and of edges; venues have no edges."""
    path = tmp_path / "heat.gids"
    rng = np.random.default_rng(0)
    indptr, indices = in_edges(rng.integers(0, 9, ROWS), ROWS, rng)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(ROWS, 1024))  # a row to a page
        writer.write_table("node", "venue", "feat", torch.randn(4, 8))
        relation = ("paper", "cites", "paper")
        writer.write_graph(relation, indptr, indices)
        writer.write_table("edge", relation, "w", torch.randn(int(indptr[-1]), 3))
    return path


def test_the_hottest_pages_stay(path: Path) -> None:
    rng = np.random.default_rng(1)
    methods = ("sampled", "reverse-pagerank")
    heats = {method: (2.0 ** rng.permutation(ROWS)).astype(np.float32) for method in methods}
    for method, values in heats.items():
        write_heat(path, method, {"paper": values, "venue": np.zeros(4)})
    heats["out-degree"] = np.asarray(FeatureStore(path).out_degrees("paper"))
    heats["auto"] = heats["reverse-pagerank"]
    for heat, values in heats.items():
        options = {"heat": heat, "policy": "static", "cache": LINES * (4096 + 16), "memory": 1 << 28}
        with feature_loader(path, ["paper.feat"], reads="random", **options) as loader:
            every = [{"paper.feat": torch.arange(row, row + 4)} for row in range(0, ROWS, 4)]
            list(loader.attach(2 * every, lambda ids: ids))
            held = loader.cached_rows("paper.feat").numpy()
        assert held.sum() <= LINES
        assert held[values > np.sort(values)[-LINES // 2]].all()


def test_auto_takes_the_best_that_each_table_has(path: Path) -> None:
    tables = ["paper.feat", "venue.feat", "paper.cites.paper.w"]

    def chosen(heat: str = "auto") -> list[str | None]:
        with feature_loader(path, tables, heat=heat, memory=1 << 28) as loader:
            return list(loader.stats()["heat"].values())

    assert chosen() == ["out-degree", None, None]
    write_heat(path, "sampled", {"paper": np.ones(ROWS), "venue": np.zeros(4)})
    assert chosen() == ["sampled", "sampled", None]
    write_heat(path, "reverse-pagerank", {"paper": np.ones(ROWS)})
    assert chosen() == ["reverse-pagerank", "sampled", None]
    assert chosen("sampled") == ["sampled", "sampled", None]
    assert chosen("none") == [None, None, None]
