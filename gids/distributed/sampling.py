"""GroupSampling: minibatches of a graph whose edges are divided among ranks. Owners draw nodes' in-edges.

Called by GroupSource for every step. All ranks sample the same steps together, several in one go. A minibatch
is the same, bit for bit, as one that a single process samples from the whole graph: a node's random numbers
depend on the node, the layer and the step, and not on who draws.

This is communication-avoiding sampling (Tripathy, Yelick, Buluc, MLSys 2024): of each node at most `fanout`
edges are sent. Samplers that look at all nodes of a layer together get whole adjacency lists instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.distributed.collective import CollectiveSampling, LayeredSteps
from gids.distributed.owners import Dealt, Owners
from gids.distributed.walks import Walks
from gids.loader.ranks import Group, Ranks, Tensors, place_of
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.forest import AnySeeds, Given, Trees
from gids.sampler.layered import LayeredSampler, Numbers
from gids.sampler.minibatch import Block
from gids.store import Graph

OURS = "a sampler of gids.sampler, without a sample() of your own"
_NOT_DISTRIBUTED = "gids.distributed cannot sample from a partitioned dataset with {}: use {}"


@dataclass(frozen=True)
class _Drawn:
    """Edges of one relation, of the nodes that were asked for, in their order.

    indptr: int64[nodes + 1]. sources, edge_ids: int64[edges]. weights: float32[edges] or None.
    """

    indptr: np.ndarray
    sources: np.ndarray
    edge_ids: np.ndarray
    weights: np.ndarray | None


class GroupSampling(CollectiveSampling):
    """Samples minibatches whose edges the ranks draw for each other.

    local: the topology of this rank's part; those of `whole` are not here. counts: {"nodes asked", "edges
    sent", "bytes sent"} to other ranks, which this increases.
    """

    def __init__(
        self,
        group: Group,
        ranks: Ranks,
        whole: Topology,
        owners: Sequence[Owners],
        *,
        local: Topology,
        counts: dict[str, int],
    ) -> None:
        super().__init__(group, ranks, whole, owners)
        self.local, self.counts = local, counts
        self._drawing: weakref.WeakKeyDictionary[Any, list[LayeredSampler]] = weakref.WeakKeyDictionary()
        whole.drawn_by = self

    def _sample(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]:
        if getattr(sampler, "divisible", False):
            return self._one_by_one(sampler, seeds, numbers)
        return _DividedSteps(self, sampler, numbers, len(seeds)).sample(seeds)

    def _one_by_one(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]:
        """The minibatches of a sampler that calls one of gids.sampler for each, and does more before and
        after, which can fail on one rank: an exchange at the end reports it to the others."""
        (seed, epoch, first), made = numbers, list[Minibatch]()
        group, failures, error = self.group, self.group.failures, None
        try:
            for step, step_seeds in enumerate(seeds, first):
                made.append(sampler.sample(self.whole, step_seeds, seed=seed, epoch=epoch, step=step))
        except Exception as raised:
            if group.failures > failures:  # all ranks know it
                raise
            error = raised
        group.meet(place_of(self.ranks.loader, epoch, first, f"sampled {len(seeds)} steps"), error)
        return made

    def drawing_for(self, sampler: LayeredSampler) -> list[LayeredSampler]:
        """By rank of the group: what draws for it from this part's edges, by their weights and its masks."""
        if not isinstance(sampler, Neighbor):
            return [sampler] * self.group.size
        weights: Any = sampler.weights
        masks = 0 if sampler.locality is None else sampler.locality.rank_count
        if weights is None and not masks:
            return [sampler] * self.group.size
        if sampler not in self._drawing:
            local = sampler
            if weights is not None:
                weights = weights if isinstance(weights, Mapping) else {self.whole.relations[0]: weights}
                held = [g for g in self.local.graphs if g.relation in weights]
                local = sampler.with_weights({g.relation: weights[g.relation][g.edge_ids] for g in held})
            self._drawing[sampler] = [local.of_rank(r, masks) if masks else local for r in self.group.ranks]
        return self._drawing[sampler]


class _DividedSteps(LayeredSteps):
    """Steps whose edges the ranks draw for each other."""

    def __init__(self, sampling: GroupSampling, sampler: Sampler, numbers: Numbers, count: int) -> None:
        super().__init__(sampling, sampler, numbers, count)
        self._sampling = sampling
        self._begins: list[list[int]] = []  # of the nodes that draw

    def begin(self, seeds: AnySeeds) -> None:
        check_sampler(self._sampler)
        self._fanouts = self._sampler.fanouts_of(self._whole)
        checked = self.checked(seeds)
        trees = None if checked.trees is None else [t.numpy() for t in checked.batch]
        self._seeds.append(checked)
        ids = [i.numpy() for i in checked.ids]
        self._nodes.append(_core.FoundNodes(self._sampler.threads, ids, trees))
        self._begins.append([0] * len(ids))

    def draw(self, layer: int) -> list[list[Block]]:
        """Ask the owners for the edges of the nodes that draw."""
        if isinstance(self._sampler, RandomWalk):
            sampling, place = self._sampling, partial(self.place, layer)
            drawn_by = sampling.local, sampling.counts
            walks = Walks(sampling, *drawn_by, self._sampler, layer, self._numbers, place)
            return [[block] for block in walks.blocks(self._nodes)]
        group, topology = self._group, self._whole
        # By step and type: nodes; for trees what they draw by, and their times.
        asks = [torch.int64] * 3 * len(topology.node_types) * self._count
        asked = group.exchange(partial(self._requests, layer), asks, self.place(layer, "asks for edges"))
        # By step and relation: the number of edges of each node, their sources and ids, and weights.
        replies = [torch.int32, torch.int64, torch.int64, torch.float32]
        answers = group.exchange(
            partial(self._answer, layer, asked),
            replies * len(topology.relations) * self._count,
            self.place(layer, "draws edges"),
        )
        return [self._assembled(layer, step, answers) for step in range(self._count)]

    def _requests(self, layer: int) -> Tensors:
        group, topology, counts = self._group, self._whole, self._sampling.counts
        messages = []
        self._dealt: list[list[Dealt]] = []  # by step and type
        drawing = {
            dst for (_, dst), fanout in zip(topology.ends, self._fanouts[layer], strict=True) if fanout
        }
        none = np.empty(0, np.int64)
        for seeds, nodes, begins in zip(self._seeds, self._nodes, self._begins, strict=True):
            self._dealt.append([])
            for t, begin in enumerate(begins):
                ids, tags, times = nodes.nodes(t)[begin:] if t in drawing else none, none, none
                if seeds.trees is not None and t in drawing:
                    trees = nodes.trees(t)[begin:]
                    tags = seeds.trees.tags[trees].astype(np.int64)
                    times = none if seeds.trees.times is None else seeds.trees.times[trees]
                dealt = Dealt(self._owners[t](ids), group.size)
                self._dealt[-1].append(dealt)
                away = len(ids) - int(dealt.counts[group.rank])
                counts["nodes asked"] += away
                for values in (ids, tags, times):
                    messages.append(
                        dealt.parts(values) if len(values) else [torch.from_numpy(none)] * group.size
                    )
                    counts["bytes sent"] += 8 * away if len(values) else 0
        return messages

    def _answer(self, layer: int, asked: Tensors) -> Tensors:
        """Draw for all ranks that ask."""
        sampling, samplers = self._sampling, self._sampling.drawing_for(self._sampler)
        if samplers[0] is samplers[-1]:
            messages = self._draw_for(layer, asked, samplers[0])
        else:  # each rank has a mask of its own
            drawn = [
                self._draw_for(layer, [[by_rank[rank]] for by_rank in asked], sampler)
                for rank, sampler in enumerate(samplers)
            ]
            messages = [[of_rank for [of_rank] in of_ranks] for of_ranks in zip(*drawn, strict=True)]
        for i, by_rank in enumerate(messages):
            away = [tensor for rank, tensor in enumerate(by_rank) if rank != sampling.group.rank]
            sampling.counts["edges sent"] += sum(map(len, away)) if i % 4 == 1 else 0
            sampling.counts["bytes sent"] += sum(tensor.nbytes for tensor in away)
        return messages

    def _draw_for(self, layer: int, asked: Tensors, sampler: LayeredSampler) -> Tensors:
        """The answers to the ranks that asked for these nodes."""
        topology, trees = self._sampling.local, self._seeds[0].trees
        types, steps = len(topology.node_types), list[Given]()
        for first in range(0, 3 * types * self._count, 3 * types):
            ids, tags, times = (
                [torch.cat(list(asked[first + 3 * t + value])) for t in range(types)] for value in range(3)
            )
            if trees is None:
                steps.append(Given(ids))
                continue
            batch = [torch.arange(begin, end) for begin, end in pairwise(np.cumsum([0, *map(len, ids)]))]
            drawn_by = torch.cat(tags).numpy().astype(np.uint32)
            limits = None if trees.times is None else torch.cat(times).numpy()
            steps.append(Given(ids, batch, Trees({}, {}, drawn_by, limits)))
        if self._sampler.draws_alone:
            drawn = sampler.draw(topology, steps, layer, self._numbers)
        else:
            drawn = self._whole_lists(layer).draw(topology, steps, 0, self._numbers)
        self._weighted = [block.weights is not None for block in drawn[0]]
        messages: list[Sequence[torch.Tensor]] = []
        for step, blocks in enumerate(drawn):
            for block, (_, dst) in zip(blocks, topology.ends, strict=True):
                counts = [len(nodes) for nodes in asked[3 * (types * step + dst)]]
                parts = [
                    _part_of(block, *part) for part in zip(np.cumsum([0, *counts]), counts, strict=False)
                ]
                messages += zip(*parts, strict=True)
        return messages

    def _whole_lists(self, layer: int) -> Neighbor:
        """Draws all in-edges, for a sampler that looks at all nodes of a layer together."""
        relations, fanouts = self._sampling.local.relations, self._fanouts[layer]
        every = {r: -1 if fanout else 0 for r, fanout in zip(relations, fanouts, strict=True)}
        return Neighbor([every], threads=self._sampler.threads)

    def _draw_from(self, layer: int, step: int, lists: list[_Drawn]) -> list[_Drawn]:
        """Draw from the in-edges of all nodes of a layer."""
        seed, epoch, first = self._numbers
        arrays = [(edges.indptr, edges.sources) for edges in lists]
        numbers = seed, epoch, first + step
        blocks = self._sampler.draw_from(self._whole, arrays, layer, numbers)
        return [
            _Drawn(
                block.indptr.numpy(),
                block.indices.numpy(),
                edges.edge_ids[block.positions.numpy()],
                None if block.weights is None else block.weights.numpy(),
            )
            for block, edges in zip(blocks, lists, strict=True)
        ]

    def _assembled(self, layer: int, step: int, answers: Tensors) -> list[Block]:
        """The blocks of a step: the sources are numbered in the order in which one process does."""
        topology, nodes, begins = self._whole, self._nodes[step], self._begins[step]
        drawn: list[_Drawn] = []
        for r, (_, dst) in enumerate(topology.ends):
            first = 4 * (len(topology.relations) * step + r)
            values = [torch.cat(list(by_rank)).numpy() for by_rank in answers[first : first + 4]]
            drawn.append(_in_order(self._dealt[step][dst].order, values, weighted=self._weighted[r]))
        if not self._sampler.draws_alone:
            drawn = self._draw_from(layer, step, drawn)
        ends = [nodes.size(t) for t in range(len(topology.node_types))]
        blocks = []
        for (src, dst), graph, edges in zip(topology.ends, topology.graphs, drawn, strict=True):
            indptr, count = edges.indptr, ends[dst] - begins[dst]
            if len(indptr) <= count:  # no relation of this layer draws from these nodes
                indptr = np.zeros(count + 1, np.int64)
            trees = None
            if self._seeds[step].trees is not None:
                trees = np.repeat(nodes.trees(dst)[begins[dst] : ends[dst]], np.diff(indptr))
            nodes.relabel(src, edges.sources, trees)
            blocks.append(Block.of_arrays(indptr, edges.sources, edges.edge_ids, edges.weights, 0, graph))
        for block, (src, _) in zip(blocks, topology.ends, strict=True):
            block.num_src = nodes.size(src)
        if getattr(self._sampler, "newest", False):
            self._begins[step] = ends
        return blocks


def _in_order(order: np.ndarray, values: list[np.ndarray], *, weighted: bool) -> _Drawn:
    """Edges in the order of the nodes that asked. order: of the nodes as they are in values, which are the
    number of edges of each node, and of all edges the sources, ids and weights."""
    degrees, *of_edges = values
    indptr = np.zeros(len(order) + 1, np.int64)
    indptr[1 + order] = degrees
    np.cumsum(indptr, out=indptr)
    to = ranges(indptr[order], degrees)
    arranged = []
    for unordered in of_edges if weighted else of_edges[:2]:
        arranged.append(np.empty_like(unordered))
        arranged[-1][to] = unordered
    sources, ids, *weights = arranged
    return _Drawn(indptr, sources, ids, weights[0] if weighted else None)


def whole_graphs(graphs: Sequence[Graph], counts: Mapping[Any, int]) -> list[Graph]:
    """The graphs that minibatches refer to. graphs: of a part. counts: edges of the whole, by relation."""
    none = np.empty(0, np.int64)
    return [
        replace(
            g,
            indices=none,
            edge_ids=None,
            edge_times=None if g.edge_times is None else none,
            edge_count=counts[g.relation],
        )
        for g in graphs
    ]


def check_sampler(sampler: Sampler) -> None:
    """Raise TypeError for a sampler that cannot sample from a graph whose edges are elsewhere."""
    if not isinstance(sampler, Neighbor | Labor | Ladies | RandomWalk) or has_own_sample(sampler):
        raise TypeError(_NOT_DISTRIBUTED.format(repr(sampler), OURS))
    if isinstance(sampler, Neighbor) and sampler.subgraph == "induced":
        raise ValueError(_NOT_DISTRIBUTED.format("subgraph='induced'", "'directional' or 'bidirectional'"))


def has_own_sample(sampler: LayeredSampler) -> bool:
    """Whether its sample() is other people's. Nothing calls it where ranks draw layer by layer."""
    kinds = (kind.__module__ for kind in type(sampler).__mro__ if "sample" in vars(kind))
    return "sample" in vars(sampler) or not next(kinds, "").startswith("gids.")


def _part_of(block: Block, first: int, count: int) -> tuple[torch.Tensor, ...]:
    """(degrees, sources, edge ids, weights) of some destinations: none of a relation that was not drawn."""
    if block.num_dst == 0:
        count = 0
    indptr = block.indptr[first : first + count + 1]
    begin, end = (int(indptr[0]), int(indptr[-1])) if count else (0, 0)
    weights = torch.empty(0) if block.weights is None else block.weights[begin:end]
    ids = edge_ids_at(block, slice(begin, end))
    degrees = indptr.diff().to(torch.int32) if count else torch.empty(0, dtype=torch.int32)
    return degrees, block.indices[begin:end], ids, weights


def edge_ids_at(block: Block, edges: slice = slice(None)) -> torch.Tensor:
    """The ids of some edges of a block of a part."""
    positions, ids = block.positions[edges], block.graph.edge_ids
    return positions if ids is None else torch.from_numpy(ids[positions.numpy()].astype(np.int64, copy=False))


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, … (lengths[0] numbers), begins[1], …"""
    lengths = lengths.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())
