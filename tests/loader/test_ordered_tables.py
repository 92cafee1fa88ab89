"""Tables whose rows lie in an order of their own: the loader hands out the source's rows all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datasets import damage
from loader_example import ROWS, Ids, check, ids_of, make_source, minibatches
from open_options import feature_loader

import gids
from gids.bench.trace import TouchedPages
from gids.cache import page_heat
from gids.cuda.device import Device
from gids.errors import StorageError
from gids.heat import hottest_nodes
from gids.store import FeatureStore
from gids.write import DatasetWriter

PAPERS = "paper.feat"


@pytest.fixture(scope="module", params=["int32", "int64"])
def path(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's tables, one of them in a random order; positions are int64 where there are many rows."""
    path = tmp_path_factory.mktemp("ordered") / "a.gids"
    with pytest.MonkeyPatch.context() as patch:
        for module in ("gids.store.manifest", "gids.write.dataset_writer", "gids.write.row_order"):
            patch.setattr(f"{module}.position_dtype", lambda _: request.param)
        with DatasetWriter(path, stripe=2) as writer:
            rng = np.random.default_rng(3)
            for name, rows in make_source().items():
                order = rng.permutation(len(rows)) if name == PAPERS else None
                writer.write_table("node", name.split(".")[0], "feat", rows, order=order)
            heavy = rng.integers(0, 60, 40_000)
            writer.write_edges(
                ("paper", "cites", "paper"),
                gids.write.edge_list(heavy, rng.integers(0, ROWS, 40_000), num_src=ROWS, num_dst=ROWS),
            )
    return path


@pytest.fixture(scope="module")
def store(path: Path) -> FeatureStore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gids.store.manifest.position_dtype", lambda _: order_dtype(path))
        return FeatureStore(path)


def order_dtype(path: Path) -> str:
    return "int32" if b"<i4" in (path / "tables/paper.feat/order.npy").read_bytes()[:128] else "int64"


def test_features_equal_the_source_on_a_device(
    device: Device, cuda_is: Callable[[Device], None], store: FeatureStore
) -> None:
    cuda_is(device)
    source = make_source()
    with feature_loader(
        store,
        list(source),
        device="cuda",
        device_memory=1 << 24,
        cache=200_000,
        staging=1 << 19,
    ) as loader:
        where = device.torch_device
        for minibatch, features in loader.attach(minibatches(5, 1, where, most=200), ids_of):
            check(source, minibatch, features)
            with loader.attach(minibatches(1, 99, where, most=100), ids_of) as through:
                for other, rows in through:
                    check(source, other, rows)
        order = store.table(PAPERS).order
        assert loader.stats()["memory"]["row orders"] == order.nbytes
        wrong = torch.tensor([5, ROWS + 2, -1])
        with pytest.raises(IndexError, match=f"id {ROWS + 2} at position 1 is out of range"):
            list(loader.attach([{PAPERS: wrong}], ids_of))


@pytest.mark.parametrize("id_", [-1, ROWS])
def test_an_id_out_of_range_is_named(store: FeatureStore, id_: int) -> None:
    with feature_loader(store, [PAPERS], memory=1 << 24) as loader:
        with pytest.raises(IndexError, match=rf"id {id_}\b"):
            list(loader.attach([{PAPERS: torch.tensor([0, id_])}], ids_of))
        ((_, features),) = loader.attach([{PAPERS: torch.tensor([7])}], ids_of)
    assert torch.equal(features[PAPERS], make_source()[PAPERS][[7]])


def test_a_damaged_page_fails_the_minibatch_that_reads_its_rows(path: Path, store: FeatureStore) -> None:
    table = store.table(PAPERS)
    rows = np.flatnonzero(np.asarray(table.order) // table.rows_per_page == 5)
    shard, offset = table.page_location(5)
    file = table.shard_paths[shard]
    whole = file.read_bytes()
    damage(file, b"\xff" * 8, offset)
    try:
        with feature_loader(store, [PAPERS], memory=1 << 24, check_crc=True) as loader:
            others = np.setdiff1d(np.arange(ROWS), rows)
            stream = loader.attach([{PAPERS: torch.from_numpy(ids)} for ids in (others[:50], rows)], ids_of)
            assert torch.equal(next(stream)[1][PAPERS], make_source()[PAPERS][others[:50]])
            with pytest.raises(StorageError, match="checksum"):
                next(stream)
    finally:
        damage(file, whole)


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


def pages_by_minibatch(store: FeatureStore, batches: list[Ids]) -> list[list[int]]:
    table = store.table(PAPERS)
    order = np.asarray(table.order)
    return [list(dict.fromkeys((order[m[PAPERS].numpy()] // table.rows_per_page).tolist())) for m in batches]


def test_the_pages_of_an_ordered_table_are_those_of_the_positions(store: FeatureStore) -> None:
    table, batches = store.table(PAPERS), minibatches(6, 2)
    touched = TouchedPages(table.page_count, table.rows_per_page, table.order)
    assert [touched.of(m[PAPERS].numpy()).tolist() for m in batches] == pages_by_minibatch(store, batches)


def test_device_memory_has_room_for_the_positions_of_rows(
    device: Device, cuda_is: Callable[[Device], None], store: FeatureStore
) -> None:
    cuda_is(device)
    options = {"device_memory": 1 << 24, "staging": 1 << 20, "window": 3, "planned": 1}
    batches = [{PAPERS: torch.arange(i, i + 100)} for i in range(8)]
    with feature_loader(store, [PAPERS], device="cuda", minibatch_rows=100, **options) as loader:
        for _ in loader.attach(batches, ids_of):
            plan = loader._placement.plan
            assert plan is not None
            assert loader.stats()["memory"]["window"] <= plan.purposes["window"]


def test_which_rows_are_held_goes_by_ids(path: Path, store: FeatureStore) -> None:
    table = store.table(PAPERS)
    ids = torch.tensor([3, 77, 500])
    with feature_loader(store, [PAPERS], memory=64 << 20) as loader:
        assert not loader.cached_rows(PAPERS).any()
        with loader.attach([{PAPERS: ids}], ids_of) as stream:
            next(stream)
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
