"""What ranks do in tests. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import same_bits

import gids.distributed
from gids.distributed.group import Group
from gids.distributed.owners import GivenOwners
from gids.distributed.sampling import GroupSampling, whole_topology
from gids.sampler import Minibatch, Sampler, Topology
from gids.store import Graph


def differences(mine: Any, theirs: Any, where: str = "minibatch") -> list[str]:
    """Where two minibatches, or parts of them, are not equal bit for bit."""
    if isinstance(theirs, torch.Tensor):
        return (
            []
            if isinstance(mine, torch.Tensor) and same_bits(mine, theirs)
            else [f"{where}: {mine} {theirs}"]
        )
    if isinstance(theirs, Mapping):
        if not isinstance(mine, Mapping) or list(mine) != list(theirs):
            return [f"{where}: {list(mine)} {list(theirs)}"]
        return [
            d for key, value in theirs.items() for d in differences(mine[key], value, f"{where}[{key!r}]")
        ]
    if isinstance(theirs, list):
        if len(mine) != len(theirs):
            return [f"{where}: {len(mine)} {len(theirs)}"]
        return [d for i, value in enumerate(theirs) for d in differences(mine[i], value, f"{where}[{i}]")]
    if isinstance(theirs, gids.sampler.Block):
        names = ("relation", "indptr", "indices", "edge_ids", "weights", "num_src")
        return [d for n in names for d in differences(getattr(mine, n), getattr(theirs, n), f"{where}.{n}")]
    if isinstance(theirs, Minibatch):
        names = ("seeds", "input_nodes", "blocks", "epoch", "step", "features", "labels", "batch", "times")
        return [d for n in names for d in differences(getattr(mine, n), getattr(theirs, n), f"{where}.{n}")]
    return [] if mine == theirs else [f"{where}: {mine!r} {theirs!r}"]


def compare_with_one_process(
    dataset: Path,
    whole: Path,
    kind: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    epochs: int,
) -> dict[str, Any]:
    """Each rank's minibatches, and those that a loader of the whole dataset gives this rank."""
    make = getattr(gids, kind)
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = gids.distributed.open(dataset, memory="64MB", timeout=30, **options)
    count = 0
    with shared, gids.open(whole, memory="64MB", reads="random") as alone:
        with (
            make(shared, **arguments) as mine,
            make(alone, rank=rank, world_size=size, **arguments) as theirs,
        ):
            assert len(mine) == len(theirs)
            for _ in range(epochs):
                for a, b in zip(mine, theirs, strict=True):
                    found = differences(a, b)
                    assert not found, found[:5]
                    count += 1
            stats = mine.stats()
    return {"minibatches": count, "stats": stats}


def part_of(graph: Graph, owners: np.ndarray, index: int) -> Graph:
    """The in-edges of the nodes that a part owns, the obvious way."""
    held = np.repeat(owners == index, np.diff(graph.indptr))
    degrees = np.where(owners == index, np.diff(graph.indptr), 0)
    ids = np.flatnonzero(held) if graph.edge_ids is None else graph.edge_ids[held]
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
        indices=graph.indices[held],
        edge_ids=ids,
        edge_times=None if graph.edge_times is None else graph.edge_times[held],
    )


def sample_together(
    graphs: list[Graph],
    owners: Mapping[str, np.ndarray],
    sampler: Sampler,
    seeds: Any,
    weights_of_ids: Sampler | None,
) -> dict[str, int]:
    """Sample three steps with the edges divided among the ranks, and from the whole graphs.

    seeds: by rank and step. weights_of_ids: the sampler of the divided graph, if its weights are by edge id.
    """
    homogeneous = len(owners) == 1
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(timeout_s=30)
    local = [part_of(g, owners[g.relation[2]], rank) for g in graphs]
    whole = whole_topology(local, {g.relation: g.num_edges for g in graphs}, homogeneous=homogeneous)
    topology = Topology(local[0] if homogeneous else local)
    owned = [GivenOwners(owners[t].astype(np.uint8), size) for t in topology.node_types]
    sampling = GroupSampling(group, topology, whole, owned)
    mine = sampling.sample_steps(weights_of_ids or sampler, seeds[rank], seed=5, epoch=2, first_step=7)
    for i, of_step in enumerate(seeds[rank]):
        theirs = sampler.sample(graphs[0] if homogeneous else graphs, of_step, seed=5, epoch=2, step=7 + i)
        found = differences(mine[i], theirs)
        assert not found, found[:5]
    assert size == 1 or sampling.counts["edges sent"] > 0
    group.close()
    return sampling.counts
