"""Owners draw edges for all ranks: minibatches are those that one process samples from the whole graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import random_in_edges
from programs import CITED as RELATIONS
from programs import COUNTS, differences
from rank_pool import RankError, RankPool

from gids.distributed.sampling import GroupSampling, whole_graphs
from gids.loader.ranks import Group, Ranks
from gids.pyg.hops import HopSampler
from gids.sampler import Labor, Ladies, LocalityBias, Neighbor, RandomWalk, TimedSeeds, Topology, sort_by_time
from gids.store import Graph
from gids.store.names import Relation

CITES, WRITES, WRITTEN = RELATIONS


def graph_of(relation: Relation, *, times: bool = False) -> Graph:
    rng = np.random.default_rng(RELATIONS.index(relation))
    num_src, num_dst = COUNTS[relation[0]], COUNTS[relation[2]]
    indptr, indices = random_in_edges(num_src, num_dst, RELATIONS.index(relation))
    made = Graph(relation, num_src, num_dst, indptr, indices, rng.permutation(len(indices)))
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


def part_of(graph: Graph, owners: np.ndarray, index: int) -> Graph:
    """The in-edges of the nodes that a part owns, the obvious way."""
    held = np.repeat(owners == index, np.diff(graph.indptr))
    degrees = np.where(owners == index, np.diff(graph.indptr), 0)
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
        indices=graph.indices[held],
        edge_ids=graph.edge_ids[held],  # type: ignore[index]
        edge_times=None if graph.edge_times is None else graph.edge_times[held],
    )


def sample_together(
    graphs: list[Graph],
    owners: Mapping[str, np.ndarray],
    samplers: Sequence[tuple[Any, Any]],
    seeds: list[list[Any]],
) -> None:
    """Sample three steps with the edges divided among the ranks, and from the whole graphs.

    samplers: of the whole graphs, and of the divided ones. seeds: by rank and step.
    """
    homogeneous = len(owners) == 1
    rank, size = dist.get_rank(), dist.get_world_size()
    with Group() as group:
        local = [part_of(g, owners[g.relation[2]], rank) for g in graphs]
        wholes = whole_graphs(local, {g.relation: g.num_edges for g in graphs})
        whole, topology = (Topology(g[0] if homogeneous else g) for g in (wholes, local))
        owned = [owners[t].astype(np.uint8).__getitem__ for t in topology.node_types]
        counts = dict.fromkeys(("nodes asked", "edges sent", "bytes sent"), 0)
        sampling = GroupSampling(group, Ranks(rank, size), whole, owned, local=topology, counts=counts)
        for sampler, divided in samplers:
            mine = sampling.sample_steps(divided, whole, seeds[rank], seed=5, epoch=2, first_step=7)
            for i, of_step in enumerate(seeds[rank]):
                numbers = {"seed": 5, "epoch": 2, "step": 7 + i}
                theirs = sampler.sample(graphs[0] if homogeneous else graphs, of_step, **numbers)
                assert not differences(mine[i], theirs), (sampler, differences(mine[i], theirs)[:5])
        assert size == 1 or counts["edges sent"] > 0


def check(ranks: RankPool, size: int, samplers: Sequence[Any], *, times: bool = False) -> None:
    """Compare with one process on a graph of one type."""
    pairs = [sampler if isinstance(sampler, tuple) else (sampler, sampler) for sampler in samplers]
    owners, seeds = {"paper": owners_of(size)["paper"]}, seeds_of(size, "paper", times=times)
    ranks.run(size, sample_together, [graph_of(CITES, times=times)], owners, pairs, seeds)


def test_one_type(ranks: RankPool) -> None:
    """Weights of a divided graph are by edge id, others by position."""
    by_id = np.random.default_rng(1).random(graph_of(CITES).num_edges).astype(np.float32)
    by_position = by_id[graph_of(CITES).edge_ids]
    samplers = [
        (Neighbor([3, 4], weights=by_position), Neighbor([3, 4], weights=by_id)),
        Neighbor([-1, 4]),
        Neighbor([3, 4], replace=True),
        Neighbor([3, 4], batch_dependency=4),
        Neighbor([3, 4], batch_dependency=4, nested=True),
        Neighbor([3, 4], locality=LocalityBias(torch.arange(COUNTS["paper"]) % 3 == 0, 8)),
        Neighbor([3, 4], disjoint=True, subgraph="bidirectional"),
        Labor([3, 4], fixed_count=True),
        Labor([3, 4, 2], layer_dependency=True, batch_dependency=3),
        Labor([3, 4], importance_sampling=2),
        Labor([3, 4], importance_sampling=-1, fixed_count=True),
        RandomWalk([3, 4], num_walks=6, walk_length=3),
        Ladies([40, 30]),
        Ladies([40, -1, 30], poisson=True),
        Ladies([40, 30], replace=False),
        HopSampler([3, 0, 2], replace=True, disjoint=True),
    ]
    check(ranks, 3, samplers)


def test_one_rank(ranks: RankPool) -> None:
    check(ranks, 1, [Neighbor([3, 4]), Labor([3, 4])])


def test_several_types(ranks: RankPool) -> None:
    samplers = [
        Neighbor([3, 4], disjoint=True),
        Neighbor([{CITES: 2, WRITES: 0, WRITTEN: 3}, {CITES: 0, WRITES: 3, WRITTEN: 0}]),
        Labor([3, 4]),
        RandomWalk([3, 4], num_walks=5, metapath=[WRITES, WRITTEN]),
        Ladies([40, 30]),
        HopSampler([3, 4]),
    ]
    graphs, pairs = [graph_of(relation) for relation in RELATIONS], [(s, s) for s in samplers]
    ranks.run(4, sample_together, graphs, owners_of(4), pairs, seeds_of(4))


def test_times(ranks: RankPool) -> None:
    kinds: list[Any] = [Neighbor, HopSampler]
    strategies: list[Any] = ["uniform", "last"]
    samplers = [k([3, 4], temporal="edges", strategy=s) for k in kinds for s in strategies]
    check(ranks, 2, samplers, times=True)


def test_a_wrong_seed_is_an_error_on_every_rank(ranks: RankPool) -> None:
    seeds, owners, sampler = seeds_of(3, "paper"), {"paper": owners_of(3)["paper"]}, Neighbor([3])
    seeds[1][2][4] = 900
    with pytest.raises(RankError) as told:
        ranks.run(3, sample_together, [graph_of(CITES)], owners, [(sampler, sampler)], seeds)
    mine = "IndexError: seed 900 is not a 'paper' node"
    assert str(told.value).count(f"RankError: rank 1 failed with {mine}") == 2
    assert f"\n{mine}: ids run from 0 to 899" in str(told.value)
