"""Owners draw edges for all ranks: minibatches are those that one process samples from the whole graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import random_in_edges
from programs import sample_together
from rank_pool import RankError, RankPool

from gids.pyg.hops import HopSampler
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor, RandomWalk, TimedSeeds, sort_by_time
from gids.store import Graph
from gids.store.names import Relation

COUNTS = {"paper": 900, "author": 300}
CITES: Relation = ("paper", "cites", "paper")
RELATIONS: list[Relation] = [CITES, ("author", "writes", "paper"), ("paper", "rev_writes", "author")]


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


CASES = [("Neighbor", 1), ("Labor", 1), *((name, 2 + i % 3) for i, name in enumerate(SAMPLERS))]


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_one_type(ranks: RankPool, name: str, size: int) -> None:
    owners = {"paper": owners_of(size)["paper"]}
    graph = graph_of(CITES, ids=name == "Labor")
    ranks.run(size, sample_together, [graph], owners, SAMPLERS[name], seeds_of(size, "paper"), None)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Neighbor", 2),
        ("Labor", 3),
        ("disjoint", 2),
        ("layer dependency", 3),
        ("Labor 2", 2),
        ("Ladies", 3),
    ],
)
def test_several_types(ranks: RankPool, name: str, size: int) -> None:
    graphs = [graph_of(r) for r in RELATIONS]
    ranks.run(size, sample_together, graphs, owners_of(size), SAMPLERS[name], seeds_of(size), None)


@pytest.mark.parametrize("size", [1, 3])
def test_walks_over_several_types(ranks: RankPool, size: int) -> None:
    _, writes, written = RELATIONS
    sampler = RandomWalk([3, 4], num_walks=5, metapath=[writes, written])
    graphs = [graph_of(r) for r in RELATIONS]
    ranks.run(size, sample_together, graphs, owners_of(size), sampler, seeds_of(size), None)


@pytest.mark.parametrize("size", [2, 4])
def test_a_relation_can_be_left_out_of_a_layer(ranks: RankPool, size: int) -> None:
    cites, writes, written = RELATIONS
    sampler = Neighbor([{cites: 2, writes: 0, written: 3}, {cites: 0, writes: 3, written: 0}])
    graphs = [graph_of(r) for r in RELATIONS]
    ranks.run(size, sample_together, graphs, owners_of(size), sampler, seeds_of(size), None)


@pytest.mark.parametrize(("strategy", "size"), [("uniform", 2), ("last", 3)])
def test_times(ranks: RankPool, strategy: Any, size: int) -> None:
    sampler = Neighbor([3, 4], temporal="edges", strategy=strategy)
    owners = {"paper": owners_of(size)["paper"]}
    seeds = seeds_of(size, "paper", times=True)
    ranks.run(size, sample_together, [graph_of(CITES, times=True)], owners, sampler, seeds, None)


@pytest.mark.parametrize("ids", [False, True])
def test_weights_are_by_edge_id(ranks: RankPool, ids: bool) -> None:
    graph = graph_of(CITES, ids=ids)
    by_id = np.random.default_rng(1).random(graph.num_edges).astype(np.float32)
    by_position = by_id if graph.edge_ids is None else by_id[graph.edge_ids]
    owners, seeds = {"paper": owners_of(3)["paper"]}, seeds_of(3, "paper")
    one, divided = Neighbor([3, 4], weights=by_position), Neighbor([3, 4], weights=by_id)
    ranks.run(3, sample_together, [graph], owners, one, seeds, divided)


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


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("sampler", [HopSampler([3, 4]), HopSampler([3, 0, 2], replace=True, disjoint=True)])
def test_hops(ranks: RankPool, sampler: HopSampler, size: int) -> None:
    """Of gids.pyg: only the nodes that were found last draw."""
    ranks.run(
        size,
        sample_together,
        [graph_of(r) for r in RELATIONS],
        owners_of(size),
        sampler,
        seeds_of(size),
        None,
    )
    owners = {"paper": owners_of(size)["paper"]}
    ranks.run(size, sample_together, [graph_of(CITES)], owners, sampler, seeds_of(size, "paper"), None)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_hops_with_times(ranks: RankPool, strategy: Any) -> None:
    sampler = HopSampler([3, 4], temporal="edges", strategy=strategy)
    owners, seeds = {"paper": owners_of(2)["paper"]}, seeds_of(2, "paper", times=True)
    ranks.run(2, sample_together, [graph_of(CITES, times=True)], owners, sampler, seeds, None)
