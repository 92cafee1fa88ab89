"""Seeds of disjoint trees: TimedSeeds, which users give, and Trees and PlantedNodes, which samplers make.

In a disjoint minibatch every seed has a tree of its own, and a node of two trees is two nodes. Trees are
numbered by the positions of their seeds, type after type. Called by LayeredSampler and Neighbor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from gids import _core
from gids.cuda import on_host
from gids.sampler.minibatch import PerType
from gids.sampler.topology import Topology


@dataclass(frozen=True)
class TimedSeeds:
    """Seeds with a time each, for a temporal sampler. ids, times: int64[n] each, or both by node type."""

    ids: PerType
    times: PerType


@dataclass(frozen=True)
class Trees:
    """The trees of a minibatch. ids, batch: the seeds and the tree of each, by type if there are several.

    tags: uint32[trees], by which they draw. times: int64[trees], or None: the sampler is not temporal.
    """

    ids: PerType
    batch: PerType
    tags: np.ndarray
    times: np.ndarray | None

    @property
    def seeds(self) -> PlantedNodes:
        return PlantedNodes(self.ids, self.batch, self)


@dataclass(frozen=True)
class PlantedNodes:
    """Nodes of trees that exist, to sample a further layer of them.

    ids, batch: int64[n] each, the node and its tree; or both by node type.
    """

    ids: PerType
    batch: PerType
    trees: Trees


AnySeeds = PerType | TimedSeeds | PlantedNodes


@dataclass(frozen=True)
class Given:
    """The checked seeds of a minibatch, and their trees if it is disjoint; lists are by node type.

    times: int64[n], of each seed.
    """

    ids: list[torch.Tensor]
    batch: list[torch.Tensor] = field(default_factory=list)
    trees: Trees | None = None
    times: list[torch.Tensor] | None = None

    def native(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None] | None:
        """The trees for the native sampler."""
        if self.trees is None:
            return None
        return [numbers.numpy() for numbers in self.batch], self.trees.tags, self.trees.times


def planted(topology: Topology, seeds: AnySeeds, *, temporal: bool) -> Given:
    """The seeds with a tree each. Raises TypeError, ValueError, KeyError and IndexError for wrong seeds.

    temporal: trees have times: those of TimedSeeds, or the seed nodes' own.
    """
    if isinstance(seeds, PlantedNodes):
        ids = topology.seeds_by_type(seeds.ids)
        batch = topology.seeds_by_type(seeds.batch, what="batch")
        for numbers, nodes, ntype in zip(batch, ids, topology.node_types, strict=True):
            if len(numbers) != len(nodes):
                raise ValueError(f"batch has {len(numbers)} values for {len(nodes)} {ntype!r} nodes")
        return Given(ids, batch, seeds.trees)
    timed = isinstance(seeds, TimedSeeds)
    ids = [on_host(i) for i in topology.seeds_by_type(seeds.ids if isinstance(seeds, TimedSeeds) else seeds)]
    times: list[torch.Tensor] | None = None
    if isinstance(seeds, TimedSeeds) and temporal:
        times = [on_host(t) for t in topology.seeds_by_type(seeds.times, what="times")]
        for values, nodes, ntype in zip(times, ids, topology.node_types, strict=True):
            if len(values) != len(nodes):
                raise ValueError(
                    f"times has {len(values)} values for {len(nodes)} {ntype!r} seeds: give one each"
                )
    elif timed:
        raise ValueError("the seeds have times, but the sampler is not temporal: use Neighbor(temporal=…)")
    elif temporal:
        times = [_own_times(topology, ntype, nodes) for ntype, nodes in enumerate(ids)]
    ends = np.cumsum([0, *map(len, ids)])
    batch = [torch.arange(begin, end) for begin, end in pairwise(ends)]
    tags = np.empty(ends[-1], np.uint32)
    roots = zip(ids, times or [torch.zeros_like(i) for i in ids], strict=True)
    for number, (nodes, values) in enumerate(roots):
        _core.tree_tags(number, nodes.numpy(), values.numpy(), tags[ends[number] : ends[number + 1]])
    of_trees = None if times is None else torch.cat(times).numpy()
    return Given(ids, batch, Trees(per_type(topology, ids), per_type(topology, batch), tags, of_trees), times)


def per_type(topology: Topology, lists: list[torch.Tensor], *, empty: bool = False) -> PerType:
    """As minibatches have it: one tensor, or a dictionary. empty: also of types whose tensor is empty."""
    if topology.homogeneous:
        return lists[0]
    return {t: values for t, values in zip(topology.node_types, lists, strict=True) if empty or len(values)}


def _own_times(topology: Topology, ntype: int, nodes: torch.Tensor) -> torch.Tensor:
    if not len(nodes):
        return nodes
    name, count = topology.node_types[ntype], topology.node_counts[ntype]
    known = topology.node_times(name)
    if known is None:
        raise ValueError(
            f"{name!r} nodes have no times, so the seeds need some: give gids.sampler.TimedSeeds(ids, times)"
        )
    check_seeds(nodes, name, count)
    return torch.from_numpy(known[nodes.numpy()].astype(np.int64))


def check_seeds(ids: torch.Tensor, ntype: str, count: int) -> None:
    """Raise IndexError for a seed that is no node. ids: on the CPU."""
    wrong = torch.nonzero((ids < 0) | (ids >= count))
    if len(wrong):
        seed = int(ids[wrong[0]])
        raise IndexError(f"seed {seed} is not a {ntype!r} node: ids run from 0 to {count - 1}")
