"""Orders of rows: rows that are read together share pages; readers see no difference."""

import numpy as np
import pytest
import torch
from datasets import read_source, save_arrays

from gids.convert import Options, convert
from gids.errors import FormatError
from gids.store import FeatureStore, verify
from gids.write import DatasetWriter
from gids.write.row_order import check_memory, community_order, degree_order, find_communities


def is_permutation(order, count):
    return np.array_equal(np.sort(order), np.arange(count))


def clustered(node_count=2000, clusters=50, degree=8, stray=0.1, seed=0):
    """In-edges that mostly stay within a cluster; clusters are scattered over the ids."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, clusters, node_count)
    members = [np.flatnonzero(cluster == c) for c in range(clusters)]
    indices = np.stack([rng.choice(members[c], degree) for c in cluster])
    strays = rng.random(indices.shape) < stray
    indices[strays] = rng.integers(0, node_count, strays.sum())
    return np.arange(node_count + 1) * degree, indices.reshape(-1), cluster


def test_degree_order_is_a_stable_sort_by_decreasing_weight():
    weights = np.random.default_rng(1).integers(0, 90_000, 3000).astype(np.uint32)
    expected = np.empty(3000, np.int64)
    expected[np.argsort(-np.minimum(weights, 65535).astype(np.int64), kind="stable")] = np.arange(3000)
    order = degree_order(weights)
    assert order.dtype == np.int32
    assert np.array_equal(order, expected)


def test_community_order_finds_the_clusters_of_a_shuffled_graph():
    indptr, indices, cluster = clustered()
    order = community_order([(indptr, indices)], np.ones(2000, np.uint32))
    assert is_permutation(order, 2000)
    by_place = cluster[np.argsort(order)].reshape(-1, 16)
    pure = np.mean([np.bincount(page).max() / 16 for page in by_place])
    assert pure > 0.8  # by chance: about 0.15
    assert np.array_equal(order, community_order([(indptr, indices)], np.ones(2000, np.uint32)))


def test_communities_are_bounded_and_single_nodes_are_sorted_by_weight():
    complete = np.tile(np.arange(200), 200)
    indptr = np.append(np.arange(201) * 200, [40_000] * 50)  # 200 nodes know each other, 50 know none
    labels, sizes = find_communities([(indptr, complete)], 250, 64)
    assert np.array_equal(sizes, np.bincount(labels, minlength=250))
    assert 16 < sizes.max() <= 64
    order = community_order([(indptr, complete)], np.arange(250).astype(np.uint32))
    assert is_permutation(order, 250)
    assert order[200:].tolist() == list(range(249, 199, -1))


def test_a_damaged_topology_is_refused():
    for indptr, indices in (([0, 1, 2], [1, 7]), ([0, 5, 2], [1, 0])):
        with pytest.raises(ValueError, match="damaged"):
            community_order([(np.array(indptr), np.array(indices))], np.ones(2, np.uint32))


@pytest.mark.parametrize(("shape", "stripe"), [((1000, 64), 1), ((999, 3, 5), 3), ((1,), 1), ((0, 4), 3)])
def test_ordered_rows_are_scanned_in_the_order_of_ids(tmp_path, shape, stripe):
    rng = np.random.default_rng(2)
    values = rng.standard_normal(shape).astype(np.float32)
    order = rng.permutation(shape[0])
    options = {"page_bytes": 512, "stripe": stripe, "memory_bytes": 1 << 20}
    with DatasetWriter(tmp_path / "a.gids", **options) as writer:
        writer.write_table("node", "_N", "feat", values, order=torch.from_numpy(order))
    assert not list(verify(tmp_path / "a.gids"))
    table = FeatureStore(tmp_path / "a.gids").table("feat")
    assert np.array_equal(table.order, order)
    scanned = [(first, rows.numpy()) for first, rows in table.scan(100)]
    assert [first for first, _ in scanned] == list(range(0, shape[0], 100))
    assert all(np.array_equal(rows, values[first : first + 100]) for first, rows in scanned)
    if shape[0] > 1:  # the bytes: the rows of a table that is written in that order
        with DatasetWriter(tmp_path / "b.gids", **options) as writer:
            writer.write_table("node", "_N", "feat", values[np.argsort(order)])
        other = FeatureStore(tmp_path / "b.gids").table("feat")
        for a, b in zip(table.shard_paths, other.shard_paths, strict=True):
            assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(("dtype", "scale"), [("float16", None), ("int8", "row"), ("int8", "column")])
def test_ordered_rows_of_many_buckets_are_cast_as_the_others_are(tmp_path, dtype, scale):
    values = np.random.default_rng(3).standard_normal((20_000, 30)).astype(np.float32)
    order = np.random.default_rng(4).permutation(20_000).astype(np.int32)
    form = {"dtype": getattr(torch, dtype), "scale": scale}
    with DatasetWriter(tmp_path / "a.gids", memory_bytes=1 << 20, workers=3) as writer:
        writer.write_table("node", "_N", "plain", values, **form)
        writer.write_table("node", "_N", "ordered", values, order=order, **form)
    plain, ordered = (FeatureStore(tmp_path / "a.gids").table(key) for key in ("plain", "ordered"))
    assert torch.equal(ordered.read_rows(np.arange(20_000)), plain.read_rows(np.arange(20_000)))


@pytest.mark.parametrize(
    ("order", "cause"),
    [(np.arange(9), "must be int"), (np.zeros(10, int), "once"), (np.arange(10) / 2, "must be int")],
)
def test_a_wrong_order_is_refused(tmp_path, order, cause):
    with pytest.raises(FormatError, match=cause), DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "_N", "feat", np.zeros((10, 4), np.float32), order=order)
    assert not list(tmp_path.iterdir())


def test_verify_finds_an_invalid_order(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_table("node", "_N", "feat", np.zeros((10, 4), np.float32), order=np.arange(10)[::-1])
    path = tmp_path / "a.gids/tables/_N.feat/order.npy"
    data = bytearray(path.read_bytes())
    data[-4:] = data[-8:-4]
    path.write_bytes(data)
    faults = list(verify(tmp_path / "a.gids"))
    assert "CRC32C" in faults[0]
    assert "must occur once" in faults[1]
    assert len(faults) == 2


def converted(source, path, **options):
    files = sorted(source.iterdir())
    convert(files, lambda scratch: read_source(source, scratch), path, Options(**options), say=[].append)
    return FeatureStore(path)


def test_tables_of_short_rows_are_ordered_by_the_graph(tmp_path):
    indptr, indices, _ = clustered()
    rng = np.random.default_rng(7)
    feat, wide = rng.standard_normal((2000, 64), np.float32), rng.standard_normal((2000, 600), np.float32)
    arrays = {"feat": feat, "small": rng.integers(0, 100, (2000, 3)), "wide": wide, "edge_w": indices * 0.5}
    save_arrays(tmp_path / "source", indptr=indptr, indices=indices, **arrays)
    store = converted(tmp_path / "source", tmp_path / "a.gids", order="community")
    assert not list(verify(store.path))
    for key in ("feat", "small", "wide"):
        assert np.array_equal(store.table(f"_N.{key}").read_rows(np.arange(2000)).numpy(), arrays[key])
    assert store.table("w").order is store.table("wide").order is None
    assert np.array_equal(store.table("feat").order, store.table("small").order)


def test_error_says_why_rows_cannot_be_ordered(tmp_path):
    with pytest.raises(FormatError, match=r"needs 40000 bytes.*give --memory 1MB"):
        check_memory("community", 2000, 30_000)
    save_arrays(tmp_path / "alone", feat=np.zeros((10, 4), np.float32))
    with pytest.raises(FormatError, match="needs a graph"):
        converted(tmp_path / "alone", tmp_path / "b.gids", order="degree")
    assert not (tmp_path / "b.gids").exists()
