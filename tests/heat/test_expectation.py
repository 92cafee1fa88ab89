"""Reverse PageRank and expected visits against dense linear algebra."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import damage
from heat_model import Dense, random_graph, write

from gids import FeatureStore, FormatError
from gids.heat import choose_seeds, expected_visits, reverse_pagerank
from gids.write import DatasetWriter

GRAPHS = [(seed, kind) for seed in (1, 2, 3) for kind in (False, True)]


def some_seeds(counts: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Of the first type, and of the second where there is one."""
    rng = np.random.default_rng(seed)
    return {ntype: rng.permutation(counts[ntype])[:7] for ntype in list(counts)[:2]}


@pytest.mark.parametrize(("seed", "heterogeneous"), GRAPHS)
@pytest.mark.parametrize("damping", [0.3, 0.85])
@pytest.mark.parametrize("block_nodes", [1 << 18, 3])
def test_reverse_pagerank_solves_its_equation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    heterogeneous: bool,
    damping: float,
    block_nodes: int,
) -> None:
    monkeypatch.setattr("gids.heat._BLOCK_NODES", block_nodes)
    counts, edges = random_graph(seed, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = some_seeds(counts, 9)
    found = reverse_pagerank(store, seeds, damping=damping, tolerance=1e-12)
    assert {ntype: len(values) for ntype, values in found.items()} == counts
    walks = damping * dense.matrix(1, one_way=True)
    expected = np.linalg.solve(np.eye(dense.nodes) - walks, dense.seeded(seeds))
    np.testing.assert_allclose(dense.vector(found), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("seed", "heterogeneous"), GRAPHS)
@pytest.mark.parametrize("fanouts", [[3], [5, 2], [1, -1, 4]])
def test_expected_visits_equal_products_of_matrices(
    tmp_path: Path, seed: int, heterogeneous: bool, fanouts: list[int]
) -> None:
    counts, edges = random_graph(seed, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = some_seeds(counts, 4)
    found = expected_visits(store, seeds, fanouts)
    expected = dense.seeded(seeds)
    for fanout in reversed(fanouts):
        expected = expected + dense.matrix(fanout) @ expected
    np.testing.assert_allclose(dense.vector(found), expected, rtol=1e-12)


def test_missing_visits_are_bounded_by_the_tolerance(tmp_path: Path) -> None:
    ring = np.arange(10)
    store = write(tmp_path / "g.gids", {"_N": 10}, {("_N", "_E", "_N"): (ring, (ring + 1) % 10)})
    seeds = {"_N": np.array([0])}
    whole = 1 / (1 - 0.9)  # a walk on a ring never ends by itself
    for tolerance in (0.5, 0.1, 0.001):
        found = reverse_pagerank(store, seeds, damping=0.9, tolerance=tolerance)["_N"].sum()
        assert whole * (1 - tolerance) <= found <= whole


def test_progress_counts_every_pass(tmp_path: Path) -> None:
    counts, edges = random_graph(5, heterogeneous=True)
    store = write(tmp_path / "g.gids", counts, edges)
    done: list[int] = []
    expected_visits(store, some_seeds(counts, 0), [3, 3], on_bytes=done.append)
    assert sum(done) == 2 * sum(store.graph(r).indices.nbytes for r in store.relations)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    counts, edges = random_graph(1, heterogeneous=False)
    store = write(tmp_path / "g.gids", counts, edges)
    good, beyond, none = {"_N": np.arange(3)}, {"_N": np.array([0, 40])}, {"_N": np.array([], np.int64)}
    for call, error, message in (
        (lambda: reverse_pagerank(store, good, damping=1.0), ValueError, "damping=1.0, tolerance=0.01; both"),
        (lambda: expected_visits(store, good, [3, 0]), ValueError, r"fanouts=\[3, 0\]; give one per layer"),
        (lambda: expected_visits(store, good, []), ValueError, "fanouts"),
        (lambda: reverse_pagerank(store, beyond), IndexError, "seeds of '_N' run from 0 to 40; there are 40"),
        (lambda: reverse_pagerank(store, none), ValueError, "there are no seeds"),
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


@pytest.mark.parametrize(
    ("array", "value", "at", "message"),
    [
        *(
            ("indices", value, -8, rf"indices\[119\] is {value}; it must be from 0 to 39")
            for value in (40, -1, 1 << 62)
        ),
        ("indptr", 1 << 40, -80, "indptr decreases or exceeds the indices"),
        ("indptr", -5, -80, "indptr decreases or exceeds the indices"),
    ],
)
def test_a_damaged_topology_is_refused(tmp_path: Path, array: str, value: int, at: int, message: str) -> None:
    counts, edges = random_graph(1, heterogeneous=False)
    store = write(tmp_path / "g.gids", counts, edges)
    damage(store.path / f"graph/_N._E._N/{array}.npy", np.int64(value).tobytes(), at)
    with pytest.raises(FormatError, match=f"topology of '_N._E._N': {message}"):
        expected_visits(store, {"_N": np.arange(40)}, [-1])
