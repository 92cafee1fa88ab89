"""Edges: sorting in any amount of memory equals the obvious way; counting; invalid input."""

import random

import numpy as np
import pytest
import torch
from datasets import sorted_edges

from gids import FormatError, _core
from gids.store import FeatureStore, verify
from gids.store.rows import ArrayRows
from gids.write import DatasetWriter, edge_list
from gids.write.edges import EdgeSorter, out_degrees
from gids.write.graph_writer import chosen_index_dtype

RELATION = ("a", "to", "b")


@pytest.mark.parametrize(
    ("shape", "memory_bytes", "workers"),
    [
        ("uniform", 1 << 30, 1),
        ("uniform", 4_000, 3),
        ("power law", 6_000, 1),
        ("one hub", 4_000, 1),
        ("one pair", 6_000, 3),
        ("empty", 4_000, 1),
    ],
)
def test_sorted_edges_do_not_depend_on_the_memory(tmp_path, shape, memory_bytes, workers):
    """By destination, also by source, and without duplicates."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    count, num_src, num_dst = (0 if shape == "empty" else 1000), 70, 200
    sources, destinations = rng.integers(0, num_src, count), rng.integers(0, num_dst, count)
    if shape == "power law":
        destinations = np.minimum(rng.zipf(1.3, count) - 1, num_dst - 1)
    if shape in ("one hub", "one pair"):
        destinations = np.where(rng.random(count) < 0.9, 123, destinations)
    if shape == "one pair":
        sources = np.where(rng.random(count) < 0.9, 42, sources)
    edges = edge_list(sources, destinations, num_src=num_src, num_dst=num_dst)
    for by_source, dedup in ((False, False), (True, False), (True, True)):
        emitted = [(np.empty(0, np.int64),) * 3]
        sorter = EdgeSorter(
            tmp_path,
            memory_bytes,
            lambda *arrays, to=emitted: to.append(arrays),
            workers=workers,
            num_src=num_src if by_source else None,
            dedup=dedup,
        )
        sorter.sort(edges.pieces, edges.count, 0, num_dst)
        degrees, found, ids = (np.concatenate(parts) for parts in zip(*emitted, strict=True))
        expected = sorted_edges(sources, destinations, num_dst, by_source=by_source, dedup=dedup)
        assert np.array_equal(np.concatenate([[0], np.cumsum(degrees)]), expected[0])
        assert np.array_equal(found, expected[1])
        assert np.array_equal(ids, expected[2])
    assert list(tmp_path.iterdir()) == [], "scratch files are removed"


def test_failing_worker_ends_the_sort(tmp_path):
    """The error of a damaged source is raised, and no thread is left waiting."""
    edges = edge_list(np.arange(900) % 60, np.arange(900) % 60, num_src=60, num_dst=60)

    def pieces(block_bytes):
        for number, piece in enumerate(edges.pieces(block_bytes)):
            if number == 9:
                raise OSError("gone")
            yield piece

    sorter = EdgeSorter(tmp_path, 3000, lambda *arrays: None, workers=3)
    with pytest.raises(OSError, match="gone"):
        sorter.sort(pieces, edges.count, 0, 60)


def test_out_degrees_are_counted_in_pieces_and_saturate():
    rng = np.random.default_rng(5)
    arrays = [rng.integers(0, 1000, 4000), rng.integers(0, 1000, 10)]
    pieces = list(out_degrees([ArrayRows(a) for a in arrays], 1000, memory_bytes=8 * 300))
    assert len(pieces) == 4
    assert np.array_equal(np.concatenate(pieces), np.bincount(np.concatenate(arrays), minlength=1000))
    counts = np.array([2**32 - 2, 5], np.uint32)
    assert _core.count_sources(np.zeros(4, np.int64), 2, 0, counts) is None
    assert counts.tolist() == [2**32 - 1, 5]


def test_a_sorted_list_needs_no_edge_ids(tmp_path):
    with DatasetWriter(tmp_path / "a.gids") as writer:
        edges = edge_list(torch.tensor([5, 6, 7]), torch.tensor([0, 0, 2]), num_src=8, num_dst=3)
        writer.write_edges(RELATION, edges)
    store = FeatureStore(tmp_path / "a.gids")
    assert store.graph().edge_ids is None
    assert not (tmp_path / "a.gids/graph/a.to.b/edge_ids.npy").exists()
    assert (store.graph().num_src, store.graph().num_dst, store.num_edges()) == (8, 3, 3)


def test_sorted_graph_is_copied(tmp_path):
    indptr, indices, ids = np.array([0, 2, 2, 3]), np.array([1, 0, 1], np.int32), np.array([2, 0, 1])
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_graph(RELATION, indptr, indices, num_src=2, edge_ids=ids)
    graph = FeatureStore(tmp_path / "a.gids").graph(RELATION)
    for found, expected in ((graph.indptr, indptr), (graph.indices, indices), (graph.edge_ids, ids)):
        assert found.dtype == np.int64
        assert np.array_equal(found, expected)
    assert list(verify(tmp_path / "a.gids")) == []


def in_edges(*arrays):
    """Write a graph of 2 sources: indptr, indices and perhaps edge ids."""
    indptr, indices, *ids = map(np.array, arrays)
    return lambda w: w.write_graph(RELATION, indptr, indices, num_src=2, edge_ids=ids[0] if ids else None)


def one_edge(src, dst):
    edges = edge_list(torch.tensor([src]), torch.tensor([dst]), num_src=9, num_dst=3)
    return lambda w: w.write_edges(RELATION, edges)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (in_edges([1, 2, 2, 3], [0, 1, 0]), r"indptr\[0\] is 1; it must be 0"),
        (in_edges([0, 2, 1, 3], [0, 1, 0]), r"indptr\[2\] is 1, less than"),
        (in_edges([0, 2, 2, 4], [0, 1, 0]), "indptr ends at 4, but there are 3 indices"),
        (in_edges([0, 2, 2, 3], [0, 2, 0]), r"relation 'a.to.b': indices\[1\] is 2; it must be from 0 to 1"),
        (in_edges([0, 2, 2, 3], [0, 1, 0], [0, 1, 3]), r"edge_ids\[2\] is 3"),
        (in_edges([0, 2, 2, 3], [0, 1, 0], [0, 1]), "3 edges but"),
        (in_edges([0, 2, 2, 3.5], [0, 1, 0]), "indptr is float64; it must be whole numbers"),
        (one_edge(9, 0), r"source\[0\] is 9"),
        (one_edge(0, -1), r"destination\[0\] is -1"),
        (one_edge(0, 0.5), "destination is float32; it must be whole numbers"),
    ],
)
def test_invalid_graph_is_refused(tmp_path, write, message):
    with pytest.raises(FormatError, match=message), DatasetWriter(tmp_path / "a.gids") as writer:
        write(writer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_src", "edge_count", "dtype"),
    [(2, 2, "int32"), (1 << 31, 5, "int32"), (2**31 + 1, 5, "int64"), (5, 2**31 + 1, "int64")],
)
def test_auto_takes_int32_where_all_numbers_fit(num_src, edge_count, dtype):
    assert chosen_index_dtype("auto", num_src, edge_count) == dtype
    assert chosen_index_dtype("int64", num_src, edge_count) == "int64"
