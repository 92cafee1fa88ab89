"""Heat: expected visits equal dense linear algebra; sampled counts have the right probabilities.

The model is one dense matrix over all nodes of all types.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import damage

from gids import FeatureStore, FormatError
from gids.heat import choose_seeds, expected_visits, reverse_pagerank, sampled_counts
from gids.write import DatasetWriter, edge_list

Edges = dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]  # relation -> sources, destinations
Counts = dict[str, int]


def random_graph(seed: int, *, heterogeneous: bool) -> tuple[Counts, Edges]:
    """Some nodes have no edges, some none inwards; edges may repeat and may be loops."""
    rng = np.random.default_rng(seed)
    if not heterogeneous:
        return {"_N": 40}, {("_N", "_E", "_N"): (rng.integers(0, 35, 120), rng.integers(5, 30, 120))}
    counts = {"paper": 30, "author": 20, "venue": 4}
    relations = [
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("venue", "prints", "paper"),
        ("paper", "by", "author"),
    ]
    edges = {}
    for relation in relations:
        many = int(rng.integers(30, 90))
        sources = rng.integers(0, counts[relation[0]] - 1, many)  # the last of each type has no out-edge
        edges[relation] = sources, rng.integers(2, counts[relation[2]], many)
    return counts, edges


def write(path: Path, counts: Counts, edges: Edges) -> FeatureStore:
    with DatasetWriter(path) as writer:
        for ntype, count in counts.items():
            writer.add_nodes(ntype, count)
        for relation, (sources, destinations) in edges.items():
            numbers = {"num_src": counts[relation[0]], "num_dst": counts[relation[2]]}
            index_dtype = "int32" if relation[1] == "cites" else "int64"
            writer.write_edges(relation, edge_list(sources, destinations, **numbers), index_dtype=index_dtype)
    return FeatureStore(path)


class Dense:
    """matrix(fanout)[i, j]: how often j draws i; columns are split evenly over relations if `one_way`."""

    def __init__(self, counts: Counts, edges: Edges) -> None:
        self.counts, self.edges = counts, edges
        ends = np.cumsum([0, *counts.values()])
        self.first = dict(zip(counts, ends, strict=False))
        self.nodes = int(ends[-1])

    def matrix(self, fanout: int, *, one_way: bool = False) -> np.ndarray:
        parts = []
        for (source, _, destination), (sources, destinations) in self.edges.items():
            adjacency = np.zeros((self.nodes, self.nodes))
            for s, d in zip(sources, destinations, strict=True):
                adjacency[self.first[source] + s, self.first[destination] + d] += 1
            degrees = adjacency.sum(axis=0)
            drawn = degrees if fanout == -1 else np.minimum(degrees, fanout)
            parts.append(adjacency * drawn / np.maximum(degrees, 1))
        ways = sum((part.sum(axis=0) > 0).astype(float) for part in parts)
        return sum(parts) / (np.maximum(ways, 1) if one_way else 1)

    def vector(self, values: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([values[ntype] for ntype in self.counts])

    def seeded(self, seeds: dict[str, np.ndarray]) -> np.ndarray:
        vector = np.zeros(self.nodes)
        for ntype, ids in seeds.items():
            vector[self.first[ntype] + ids] = 1
        return vector

    def reachable(self, start: int, hops: int) -> np.ndarray:
        """bool[nodes]: the nodes that sampling all neighbors finds from one node."""
        found = np.zeros(self.nodes)
        found[start] = 1
        for _ in range(hops):
            found = found + self.matrix(-1) @ found
        return found > 0


def some_seeds(counts: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Of the first type, and of the second where there is one."""
    rng = np.random.default_rng(seed)
    return {ntype: rng.permutation(counts[ntype])[:7] for ntype in list(counts)[:2]}


@pytest.mark.parametrize("heterogeneous", [False, True])
@pytest.mark.parametrize("damping", [0.3, 0.85])
def test_reverse_pagerank_solves_its_equation(tmp_path: Path, heterogeneous: bool, damping: float) -> None:
    """Less than one visit in a hundred is missing."""
    counts, edges = random_graph(2, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = some_seeds(counts, 9)
    found = reverse_pagerank(store, seeds, damping=damping)
    assert {ntype: len(values) for ntype, values in found.items()} == counts
    walks = damping * dense.matrix(1, one_way=True)
    expected = np.linalg.solve(np.eye(dense.nodes) - walks, dense.seeded(seeds))
    missing = expected - dense.vector(found)
    assert (missing > -1e-9).all()
    assert missing.sum() <= 0.01 * expected.sum()


@pytest.mark.parametrize("heterogeneous", [False, True])
@pytest.mark.parametrize("fanouts", [[5, 2], [1, -1, 4]])
def test_expected_visits_equal_products_of_matrices(
    tmp_path: Path, heterogeneous: bool, fanouts: list[int]
) -> None:
    counts, edges = random_graph(3, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = some_seeds(counts, 4)
    found = expected_visits(store, seeds, fanouts)
    expected = dense.seeded(seeds)
    for fanout in reversed(fanouts):
        expected = expected + dense.matrix(fanout) @ expected
    np.testing.assert_allclose(dense.vector(found), expected, rtol=1e-12)


def test_nodes_are_visited_in_every_block_of_many(tmp_path: Path) -> None:
    nodes = 300_000
    ends = np.array([5, nodes - 1]), np.array([nodes - 2, 7])
    store = write(tmp_path / "g.gids", {"_N": nodes}, {("_N", "_E", "_N"): ends})
    found = expected_visits(store, {"_N": np.array([7, nodes - 2, nodes - 2])}, [3])["_N"]
    assert np.flatnonzero(found).tolist() == [5, 7, nodes - 2, nodes - 1]
    assert found[[5, 7, nodes - 2, nodes - 1]].tolist() == [2, 1, 2, 1]


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    counts, edges = random_graph(1, heterogeneous=False)
    store = write(tmp_path / "g.gids", counts, edges)
    good, beyond, none = {"_N": np.arange(3)}, {"_N": np.array([0, 40])}, {"_N": np.array([], np.int64)}
    for call, error, message in (
        (lambda: reverse_pagerank(store, good, damping=1.0), ValueError, "damping=1.0; it must be"),
        (lambda: expected_visits(store, good, [3, 0]), ValueError, r"fanouts=\[3, 0\]; give one per layer"),
        (lambda: expected_visits(store, good, []), ValueError, "fanouts"),
        (lambda: reverse_pagerank(store, beyond), IndexError, "seeds of '_N' run from 0 to 40; there are 40"),
        (lambda: reverse_pagerank(store, none), ValueError, "there are no seeds"),
        (lambda: sampled_counts(store, good, [3], batch_size=0), ValueError, "batch_size=0; it must be"),
        (lambda: sampled_counts(store, good, [-2]), ValueError, "give one per layer"),
        (lambda: sampled_counts(store, beyond, [3]), IndexError, "there are 40 nodes"),
        (lambda: choose_seeds(store, "train"), ValueError, r"no node of g.gids is in a train split: give"),
        (lambda: choose_seeds(store, "some"), ValueError, "seeds='some'"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert choose_seeds(store, "all")["_N"].tolist() == list(range(40))


def test_a_dataset_without_topology_is_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "t.gids") as writer:
        writer.write_table("node", "_N", "feat", np.zeros((4, 2), np.float32))
    with pytest.raises(FormatError, match=r"t.gids has no topology: convert the edges too"):
        reverse_pagerank(FeatureStore(tmp_path / "t.gids"), {"_N": np.arange(2)})


def test_a_damaged_topology_is_refused(tmp_path: Path) -> None:
    for array, value, at, message in (
        ("indices", 40, -8, r"indices\[119\] is (40; it must be from|outside) 0 to 39"),
        ("indices", -1, -8, r"indices\[119\] is (-1; it must be from|outside) 0 to 39"),
        ("indptr", 1 << 40, -80, "indptr decreases or exceeds the indices"),
    ):
        store = write(tmp_path / f"{value}.gids", *random_graph(1, heterogeneous=False))
        damage(store.path / f"graph/_N._E._N/{array}.npy", np.int64(value).tobytes(), at)
        for computed in (expected_visits, sampled_counts):
            with pytest.raises(FormatError, match=rf"topology of '_N\._E\._N': {message}"):
                computed(store, {"_N": np.arange(40)}, [-1])


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_counts_with_all_neighbors_equal_reachability(tmp_path: Path, heterogeneous: bool) -> None:
    counts, edges = random_graph(6, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = {ntype: np.arange(1, count, 3) for ntype, count in counts.items()}
    found = sampled_counts(store, seeds, [-1, -1], batch_size=1)  # an epoch: each seed once
    starts = [dense.first[ntype] + i for ntype, ids in seeds.items() for i in ids]
    assert np.array_equal(dense.vector(found), sum(dense.reachable(s, 2).astype(int) for s in starts))


def test_the_same_seed_gives_the_same_counts_and_each_minibatch_draws_anew(tmp_path: Path) -> None:
    star = np.arange(1, 21), np.zeros(20, np.int64)  # node 0 has 20 in-edges
    store = write(tmp_path / "g.gids", {"_N": 21}, {("_N", "_E", "_N"): star})
    one, same, other = (
        sampled_counts(store, {"_N": np.zeros(200, np.int64)}, [5], batch_size=1, seed=s)["_N"]
        for s in (1, 1, 2)
    )
    assert one[0] == 200
    assert one[1:].sum() == 200 * 5
    assert np.abs(one[1:] - 50).max() < 5 * np.sqrt(200 * 0.25 * 0.75)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_an_epoch_has_every_seed_once(tmp_path: Path) -> None:
    lonely = (np.array([9]), np.array([9]))
    store = write(tmp_path / "g.gids", {"_N": 10}, {("_N", "_E", "_N"): lonely})
    totals: list[int] = []
    found = sampled_counts(store, {"_N": np.arange(8)}, [3], batch_size=3, on_total=totals.append)["_N"]
    assert found.tolist() == [1] * 8 + [0, 0]
    assert totals == [3]
