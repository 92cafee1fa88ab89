"""Sampled counts: seeded, without replacement, with the right probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import damage
from heat_model import Dense, random_graph, write

from gids import FormatError
from gids.heat import sampled_counts


@pytest.mark.parametrize("heterogeneous", [False, True])
@pytest.mark.parametrize("hops", [1, 2])
def test_counts_with_all_neighbors_equal_reachability(tmp_path: Path, heterogeneous: bool, hops: int) -> None:
    counts, edges = random_graph(6, heterogeneous=heterogeneous)
    store, dense = write(tmp_path / "g.gids", counts, edges), Dense(counts, edges)
    seeds = {ntype: np.arange(1, count, 3) for ntype, count in counts.items()}
    found = sampled_counts(store, seeds, [-1] * hops, batch_size=1)  # an epoch: each seed once
    starts = [dense.first[ntype] + i for ntype, ids in seeds.items() for i in ids]
    assert np.array_equal(dense.vector(found), sum(dense.reachable(s, hops).astype(int) for s in starts))


def test_counts_match_the_probabilities(tmp_path: Path) -> None:
    star = np.arange(1, 21), np.zeros(20, np.int64)  # node 0 has 20 in-edges
    store = write(tmp_path / "g.gids", {"_N": 21}, {("_N", "_E", "_N"): star})
    found = sampled_counts(store, {"_N": np.array([0])}, [5], batches=4000)["_N"]
    assert found[0] == 4000
    assert found[1:].sum() == 4000 * 5
    assert np.abs(found[1:] - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)


def test_the_same_seed_gives_the_same_counts(tmp_path: Path) -> None:
    counts, edges = random_graph(7, heterogeneous=True)
    store = write(tmp_path / "g.gids", counts, edges)
    seeds = {"paper": np.arange(30)}
    one, two, other = (
        Dense(counts, edges).vector(sampled_counts(store, seeds, [2, 2], batch_size=4, batches=9, seed=s))
        for s in (1, 1, 2)
    )
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_epoch_has_every_seed_once_and_further_batches_begin_a_new_one(tmp_path: Path) -> None:
    lonely = (np.array([9]), np.array([9]))
    store = write(tmp_path / "g.gids", {"_N": 10}, {("_N", "_E", "_N"): lonely})
    totals: list[int] = []
    seeds = {"_N": np.arange(8)}
    found = sampled_counts(store, seeds, [3], batch_size=3, on_total=totals.append)["_N"]
    assert found.tolist() == [1] * 8 + [0, 0]
    assert totals == [3]
    found = sampled_counts(store, seeds, [3], batch_size=3, batches=6)["_N"]
    assert found.tolist() == [2] * 8 + [0, 0]


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    counts, edges = random_graph(1, heterogeneous=False)
    store = write(tmp_path / "g.gids", counts, edges)
    good = {"_N": np.arange(3)}
    with pytest.raises(ValueError, match="batch_size=0, batches=None; both must be 1 or more"):
        sampled_counts(store, good, [3], batch_size=0)
    with pytest.raises(ValueError, match="batches=0"):
        sampled_counts(store, good, [3], batches=0)
    with pytest.raises(ValueError, match="give one per layer"):
        sampled_counts(store, good, [-2])
    with pytest.raises(IndexError, match="there are 40 nodes"):
        sampled_counts(store, {"_N": np.array([-1])}, [3])


def test_sources_out_of_range_are_refused(tmp_path: Path) -> None:
    counts, edges = random_graph(1, heterogeneous=False)
    store = write(tmp_path / "g.gids", counts, edges)
    damage(store.path / "graph/_N._E._N/indices.npy", np.int64(-3).tobytes(), -8)
    with pytest.raises(FormatError, match=r"indices\[119\] is outside 0 to 39; run `gids verify`"):
        sampled_counts(store, {"_N": np.arange(40)}, [-1])
