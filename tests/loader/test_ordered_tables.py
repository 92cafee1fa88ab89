"""Tables whose rows lie in an order of their own: rows, lines and heat go by ids all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from emulator import EmulatedDevice
from loader_example import ROWS, ids_of, make_source
from open_loaders import feature_loader

import gids
from gids.cache import page_heat
from gids.heat import hottest_nodes
from gids.store import FeatureStore
from gids.write import DatasetWriter

PAPERS = "paper.feat"


@pytest.fixture(scope="module", params=["int32", "int64"])
def store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Papers in a random order; positions are int64 where there are many rows."""
    path = tmp_path_factory.mktemp("ordered") / "a.gids"
    with pytest.MonkeyPatch.context() as patch:
        for module in ("gids.store.manifest", "gids.write.dataset_writer", "gids.write.row_order"):
            patch.setattr(f"{module}.position_dtype", lambda _: request.param)
        with DatasetWriter(path, stripe=2) as writer:
            rng = np.random.default_rng(3)
            writer.write_table("node", "paper", "feat", make_source()[PAPERS], order=rng.permutation(ROWS))
            heavy = rng.integers(0, 60, 40_000)
            edges = gids.write.edge_list(heavy, rng.integers(0, ROWS, 40_000), num_src=ROWS, num_dst=ROWS)
            writer.write_edges(("paper", "cites", "paper"), edges)
        return FeatureStore(path)


def test_heat_is_that_of_the_pages_rows(store: FeatureStore) -> None:
    table = store.table(PAPERS)
    weights = np.asarray(store.out_degrees("paper"))
    by_place = np.empty_like(weights)
    order: npt.NDArray[Any] = np.asarray(table.order)
    by_place[order] = weights
    expected = page_heat(by_place, table.rows_per_page)
    found = page_heat(weights, table.rows_per_page, order)
    assert np.abs(found.astype(int) - expected).max() <= 1  # float32 rounding
    assert found.max() == 255


def test_which_rows_are_held_goes_by_ids(store: FeatureStore) -> None:
    table = store.table(PAPERS)
    ids = torch.tensor([3, 77, 500])
    with feature_loader(store, [PAPERS], memory=64 << 20) as loader:
        assert not loader.cached_rows(PAPERS).any()
        with loader.attach([{PAPERS: ids}], ids_of) as stream:
            _, features = next(stream)
        assert torch.equal(features[PAPERS], make_source()[PAPERS][ids])
        pages = set((np.asarray(table.order)[ids] // table.rows_per_page).tolist())
        expected = [place // table.rows_per_page in pages for place in np.asarray(table.order).tolist()]
        assert loader.cached_rows(PAPERS).tolist() == expected
    heat = page_heat(store.heat("out-degree", "paper"), table.rows_per_page, table.order)
    held = hottest_nodes(store, PAPERS, 40 * (table.page_bytes + 16)).numpy()
    per_page = np.zeros(table.page_count, np.int64)
    np.add.at(per_page, np.asarray(table.order)[held] // table.rows_per_page, 1)
    assert (per_page > 0).sum() == 40
    assert set(per_page) == {0, table.rows_per_page}  # whole pages
    assert heat[per_page > 0].min() >= heat[per_page == 0].max()


def test_device_memory_has_room_for_the_order_of_rows(store: FeatureStore, path: Path, cuda_is: Any) -> None:
    cuda_is(EmulatedDevice())
    lines = []
    for of in (path, store):
        with feature_loader(of, [PAPERS], device="cuda", device_memory=2 << 20, staging=1 << 18) as loader:
            next(loader.attach([{PAPERS: torch.arange(50)}], ids_of))
            memory = loader.stats()["memory"]
            lines.append(memory["lines"] + memory.get("row orders", 0))
    assert lines[1] <= lines[0] + 4096, "the order takes the place of lines"
