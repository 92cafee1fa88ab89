"""Owners draw edges for all ranks: minibatches are those that one process samples from the whole graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from programs import CITED as RELATIONS
from programs import COUNTS, sample_together
from rank_pool import RankError, RankPool

from gids.pyg.hops import HopSampler
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor, RandomWalk, TimedSeeds, sort_by_time
from gids.store import Graph
from gids.store.names import Relation

CITES = RELATIONS[0]


def graph_of(relation: Relation, *, ids: bool = False, times: bool = False) -> Graph:
    rng = np.random.default_rng(RELATIONS.index(relation))
    num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
    indptr, indices = random_in_edges(num_src, num_dst, RELATIONS.index(relation))
    edge_ids = rng.permutation(len(indices)) if ids else None
    made = Graph(relation, num_src, num_dst, indptr, indices, edge_ids)
    if times:
        made = sort_by_time(replace(made, edge_times=rng.integers(0, 99, len(indices))), by="edges")
    return made


def owners_of(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {ntype: rng.integers(0, size, count) for ntype, count in COUNTS.items()}


def seeds_of(size: int, ntype: str | None = None, *, times: bool = False) -> list[list[Any]]:
    """Three steps for each rank; the seeds repeat."""
    generator = torch.Generator().manual_seed(size)

    def of_step() -> Any:
        ids = {
            t: torch.randint(0, COUNTS[t], (30 if t == "paper" else 8,), generator=generator) for t in COUNTS
        }
        if times:
            return TimedSeeds(ids["paper"], torch.randint(0, 99, (30,), generator=generator))
        return ids["paper"] if ntype else ids

    return [[of_step() for _ in range(3)] for _ in range(size)]


SAMPLERS: dict[str, Any] = {
    "Neighbor": Neighbor([3, 4]),
    "all": Neighbor([-1, 4]),
    "replace": Neighbor([3, 4], replace=True),
    "dependent": Neighbor([3, 4], batch_dependency=4),
    "nested": Neighbor([3, 4], batch_dependency=4, nested=True),
    "locality": Neighbor([3, 4], locality=LocalityBias(torch.arange(COUNTS["paper"]) % 3 == 0, 8)),
    "disjoint": Neighbor([3, 4], disjoint=True),
    "bidirectional": Neighbor([3, 4], subgraph="bidirectional"),
    "disjoint bidirectional": Neighbor([3, 4], disjoint=True, subgraph="bidirectional"),
    "Labor": Labor([3, 4]),
    "fixed count": Labor([3, 4], fixed_count=True),
    "layer dependency": Labor([3, 4, 2], layer_dependency=True, batch_dependency=3),
    "Labor 2": Labor([3, 4], importance_sampling=2),
    "Labor to convergence, fixed": Labor([3, 4], importance_sampling=-1, fixed_count=True),
    "RandomWalk": RandomWalk([3, 4], num_walks=6, walk_length=3),
    "Ladies": Ladies([40, 30]),
    "Ladies poisson": Ladies([40, -1, 30], poisson=True),
    "Ladies distinct": Ladies([40, 30], replace=False),
}


_, WRITES, WRITTEN = RELATIONS
TYPED: dict[str, Any] = SAMPLERS | {
    "metapath": RandomWalk([3, 4], num_walks=5, metapath=[WRITES, WRITTEN]),
    "left out": Neighbor([{CITES: 2, WRITES: 0, WRITTEN: 3}, {CITES: 0, WRITES: 3, WRITTEN: 0}]),
    "hops": HopSampler([3, 4]),
    "hops in trees": HopSampler([3, 0, 2], replace=True, disjoint=True),
}
"""The last two are those of gids.pyg: only the nodes that were found last draw."""


def check(
    ranks: RankPool, size: int, sampler: Any, relations: list[Relation], divided: Any = None, **kinds: bool
) -> None:
    """Compare with one process. divided: the sampler of the ranks. kinds: of the graphs; times: of seeds."""
    graphs, owners = [graph_of(relation, **kinds) for relation in relations], owners_of(size)
    if relations == [CITES]:
        owners = {"paper": owners["paper"]}
    ntype = "paper" if relations == [CITES] else None
    seeds = seeds_of(size, ntype, times=kinds.get("times", False))
    ranks.run(size, sample_together, graphs, owners, sampler, seeds, divided)


CASES = [("Neighbor", 1), ("Labor", 1), *((name, 2 + i % 3) for i, name in enumerate(SAMPLERS))]


@pytest.mark.few(14)
@pytest.mark.parametrize(("name", "size"), [*CASES, ("hops", 1), ("hops", 3), ("hops in trees", 3)])
def test_one_type(ranks: RankPool, name: str, size: int) -> None:
    check(ranks, size, TYPED[name], [CITES], ids=name == "Labor")


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("metapath", 1), ("metapath", 3), ("left out", 2), ("left out", 4), ("hops", 3), ("Neighbor", 2)),
        *(("hops in trees", 1), ("Labor", 3), ("disjoint", 2), ("layer dependency", 3), ("Labor 2", 2)),
        ("Ladies", 3),
    ],
)
def test_several_types(ranks: RankPool, name: str, size: int) -> None:
    check(ranks, size, TYPED[name], RELATIONS)


@pytest.mark.parametrize("kind", [Neighbor, HopSampler])
@pytest.mark.parametrize(("strategy", "size"), [("uniform", 2), ("last", 3)])
def test_times(ranks: RankPool, kind: Any, strategy: Any, size: int) -> None:
    check(ranks, size, kind([3, 4], temporal="edges", strategy=strategy), [CITES], times=True)


@pytest.mark.parametrize("ids", [False, True])
def test_weights_are_by_edge_id(ranks: RankPool, ids: bool) -> None:
    graph = graph_of(CITES, ids=ids)
    by_id = np.random.default_rng(1).random(graph.num_edges).astype(np.float32)
    by_position = by_id if graph.edge_ids is None else by_id[graph.edge_ids]
    whole, divided = Neighbor([3, 4], weights=by_position), Neighbor([3, 4], weights=by_id)
    check(ranks, 3, whole, [CITES], divided, ids=ids)


def test_a_wrong_seed_is_an_error_on_every_rank(ranks: RankPool) -> None:
    seeds = seeds_of(3, "paper")
    seeds[1][2][4] = 900
    owners = {"paper": owners_of(3)["paper"]}
    with pytest.raises(RankError) as told:
        ranks.run(3, sample_together, [graph_of(CITES)], owners, Neighbor([3]), seeds, None)
    assert (
        str(told.value).count("RankError: rank 1 failed with IndexError: seed 900 is not a 'paper' node") == 2
    )
    assert "\nIndexError: seed 900 is not a 'paper' node: ids run from 0 to 899" in str(told.value)
