"""Which heat the loader gives to the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import in_edges
from open_options import feature_loader

from gids import FeatureLoader
from gids.cache import page_heat
from gids.heat import write_heat
from gids.store import FeatureStore
from gids.write import DatasetWriter

ROWS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Papers cite papers and have tables of nodes and of edges; venues have no edges."""
    path = tmp_path / "heat.gids"
    rng = np.random.default_rng(0)
    indptr, indices = in_edges(rng.integers(0, 9, ROWS), ROWS, rng)
    with DatasetWriter(path) as writer:
        writer.write_table("node", "paper", "feat", torch.randn(ROWS, 512))  # two rows to a page
        writer.write_table("node", "venue", "feat", torch.randn(4, 8))
        relation = ("paper", "cites", "paper")
        writer.write_graph(relation, indptr, indices)
        writer.write_table("edge", relation, "w", torch.randn(int(indptr[-1]), 3))
    return path


def heat_in_words(loader: FeatureLoader, table: str) -> np.ndarray:
    ids = {table: torch.arange(4)}
    list(loader.attach([ids], lambda m: m))
    words = loader._cache._caches[table].words()  # type: ignore[union-attr]
    return words >> np.uint64(24) & np.uint64(255)


def test_the_heat_asked_for_is_in_the_page_words(path: Path) -> None:
    rng = np.random.default_rng(1)
    stored = {m: rng.pareto(1, ROWS).astype(np.float32) for m in ("sampled", "reverse-pagerank")}
    for method, values in stored.items():
        write_heat(path, method, {"paper": values, "venue": np.zeros(4)})
    stored["out-degree"] = np.asarray(FeatureStore(path).out_degrees("paper"))
    expected = {m: page_heat(values, 2) for m, values in stored.items()}
    expected["none"] = np.zeros(ROWS // 2, np.uint8)
    expected["auto"] = expected["reverse-pagerank"]
    assert len({tuple(e) for e in expected.values()}) == 4
    for heat, pages in expected.items():
        with feature_loader(path, ["paper.feat"], heat=heat, memory=1 << 28) as loader:
            assert np.array_equal(heat_in_words(loader, "paper.feat"), pages)


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


def test_heat_that_is_not_stored_names_the_command(path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        feature_loader(path, ["paper.feat"], heat="sampled", memory=1 << 28)
    assert f"compute it with `gids heat {path} --method sampled`" in str(caught.value)
    with pytest.raises(
        ValueError, match=r"heat must be one of auto, reverse-pagerank, .* \(got 'pagerank'\)"
    ):
        feature_loader(path, ["paper.feat"], heat="pagerank", memory=1 << 28)
