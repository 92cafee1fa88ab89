"""GroupSampling: minibatches of a graph whose edges are divided among ranks. Owners draw nodes' in-edges.

Called by GroupSource for every step. All ranks sample the same steps together, several in one go. A minibatch
is the same, bit for bit, as one that a single process samples from the whole graph: a node's random numbers
depend on the node, the layer and the step, and not on who draws.

This is communication-avoiding sampling (Tripathy, Yelick, Buluc, MLSys 2024): of each node at most `fanout`
edges are sent. Samplers that look at all nodes of a layer together get whole adjacency lists instead.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from gids import _core
from gids.distributed.group import Group
from gids.distributed.owners import Dealt, Owners
from gids.distributed.walks import Walks
from gids.loader.ranks import Ranks, place_of
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.forest import AnySeeds, Given, Trees, check_seeds
from gids.sampler.layered import LayeredSampler, Numbers
from gids.sampler.minibatch import Block
from gids.store import Graph

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


class GroupSampling:
    """Samples minibatches whose edges the ranks of a group draw for each other.

    ranks: of the loader. local: the topology of this rank's part. whole: the one that minibatches refer to;
    its edges are not here. owners: of the nodes of each type of `whole`. counts: {"nodes asked", "edges
    sent", "bytes sent"} to other ranks, which this increases.
    """

    def __init__(
        self,
        group: Group,
        ranks: Ranks,
        local: Topology,
        whole: Topology,
        owners: Sequence[Owners],
        counts: dict[str, int],
    ) -> None:
        self.group, self.ranks, self.counts = group, ranks, counts
        self.local, self.whole, self.owners = local, whole, list(owners)
        self._locals: weakref.WeakKeyDictionary[Any, Neighbor] = weakref.WeakKeyDictionary()
        self._of_ranks: weakref.WeakKeyDictionary[Any, list[Neighbor]] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakKeyDictionary[Any, dict[int, LayeredSampler]] = weakref.WeakKeyDictionary()
        whole.drawn_by = self

    def sample_steps(
        self,
        sampler: Sampler,
        topology: Topology,
        seeds: Sequence[AnySeeds],
        *,
        seed: int,
        epoch: int,
        first_step: int,
    ) -> list[Minibatch]:
        """The minibatches of successive steps. Collective. Raises as the sampler, and RankError."""
        assert topology is self.whole
        if getattr(sampler, "by_layers", False):
            return self._by_layers(sampler, seeds, (seed, epoch, first_step))
        return _DividedSteps(self, sampler, (seed, epoch, first_step), len(seeds)).sample(seeds)

    def _by_layers(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]:
        """sample_steps() of a sampler that calls sample_layer() for every layer, and does more between, which
        can fail on one rank: an exchange at the end reports it to the others, wherever they are."""
        (seed, epoch, first), made = numbers, list[Minibatch]()
        group, failures, error = self.group, self.group.failures, None
        try:
            for step, step_seeds in enumerate(seeds, first):
                made.append(sampler.sample(self.whole, step_seeds, seed=seed, epoch=epoch, step=step))
        except Exception as raised:
            if group.failures > failures:  # sample_layer() raised it, on all ranks
                raise
            error = raised
        group.meet(place_of(self.ranks.loader, epoch, first, f"sampled {len(seeds)} steps"), error)
        return made

    def sample_layer(
        self, sampler: LayeredSampler, seeds: AnySeeds, layer: int, *, seed: int, epoch: int, step: int
    ) -> Minibatch:
        """As LayeredSampler.sample_layer. Collective."""
        samplers = self._layers.setdefault(sampler, {})
        if layer not in samplers:
            samplers[layer] = sampler.only(layer)
        [made] = self.sample_steps(
            samplers[layer], self.whole, [seeds], seed=seed, epoch=epoch, first_step=step
        )
        return made

    def of_copies(self, copies: Topology) -> GroupSampling:
        """The same for a topology with the same relations between types of other names."""
        pairs = list(zip(self.local.graphs, copies.graphs, strict=True))
        owners = dict(zip(self.whole.node_types, self.owners, strict=True))
        names = {c.relation[i]: g.relation[i] for g, c in pairs for i in (0, 2)}
        local = Topology([replace(g, relation=c.relation) for g, c in pairs])
        copied = [owners[names[t]] for t in copies.node_types]
        return GroupSampling(self.group, self.ranks, local, copies, copied, self.counts)

    def drawing_for(self, sampler: LayeredSampler) -> Sequence[LayeredSampler]:
        """The samplers to draw with for each rank of the group: one alone, if it is the same for all."""
        if not isinstance(sampler, Neighbor) or sampler.locality is None or not sampler.locality.rank_count:
            return [sampler]
        if sampler not in self._of_ranks:
            count = sampler.locality.rank_count
            self._of_ranks[sampler] = [sampler.of_rank(rank, count) for rank in self.group.ranks]
        return self._of_ranks[sampler]

    def local_of(self, sampler: LayeredSampler) -> LayeredSampler:
        """The same sampler, with the weights of this part's edges."""
        if not isinstance(sampler, Neighbor) or sampler.weights is None:
            return sampler
        local = self._locals.get(sampler)
        if local is None:
            weights: Any = sampler.weights
            if not isinstance(weights, Mapping):
                weights = {self.whole.relations[0]: weights}
            held = [g for g in self.local.graphs if g.relation in weights]
            self._locals[sampler] = local = sampler.with_weights(
                {g.relation: weights[g.relation][g.edge_ids] for g in held}
            )
        return local


class LayeredSteps(ABC):
    """Some steps, while all ranks make them, layer by layer. Lists are by step, then by node type.

    whole: the topology that minibatches refer to. numbers: of the first step. count: of the steps.
    """

    def __init__(
        self, group: Group, ranks: Ranks, whole: Topology, sampler: Sampler, numbers: Numbers, count: int
    ) -> None:
        self._group, self._loader, self._whole = group, ranks.loader, whole
        self._sampler = cast(LayeredSampler, sampler)  # else begin() raises
        self._numbers, self._count = numbers, count
        self._seeds: list[Given] = []
        self._nodes: list[_core.FoundNodes] = []  # so far

    def sample(self, seeds: Sequence[AnySeeds]) -> list[Minibatch]:
        """The minibatches of these seeds. Collective."""
        error: Exception | None = None  # the first exchange raises it, so that it reaches the other ranks
        try:
            for step_seeds in seeds:
                self.begin(step_seeds)
        except Exception as raised:
            error = raised
        layers: list[list[list[Block]]] = [[] for _ in seeds]
        for layer in range(getattr(self._sampler, "layer_count", 1)):
            for step_layers, blocks in zip(layers, self.draw(layer, error), strict=True):
                step_layers.append(blocks)
        return [self.finish(step, step_layers) for step, step_layers in enumerate(layers)]

    @abstractmethod
    def begin(self, seeds: AnySeeds) -> None:
        """Check the seeds of the next step."""

    @abstractmethod
    def draw(self, layer: int, error: Exception | None) -> list[list[Block]]:
        """Draw one layer: by step, a block of each relation. Collective. The first exchange raises error."""

    def finish(self, step: int, layers: list[list[Block]]) -> Minibatch:
        """The minibatch of a step."""
        types, nodes, (_, epoch, first) = range(len(self._whole.node_types)), self._nodes[step], self._numbers
        trees = []
        if self._seeds[step].trees is not None:
            trees = [torch.from_numpy(nodes.trees(t).astype(np.int64)) for t in types]
        drawn = [torch.from_numpy(nodes.nodes(t)) for t in types], layers, trees
        return self._sampler.finish(self._whole, self._seeds[step], drawn, epoch, first + step)

    def checked(self, seeds: AnySeeds) -> Given:
        """The seeds. Raises as the sampler, and IndexError for one that is no node."""
        checked, whole = self._sampler.prepare(self._whole, seeds), self._whole
        for ids, ntype, count in zip(checked.ids, whole.node_types, whole.node_counts, strict=True):
            check_seeds(ids, ntype, count)
        return checked

    def place(self, layer: int, what: str) -> str:
        """Where this rank is, for Group.exchange, from what it exchanges."""
        _, epoch, first = self._numbers
        return place_of(self._loader, epoch, first, f"{what} of layer {layer}, {self._count} steps")


class _DividedSteps(LayeredSteps):
    """Steps whose edges the ranks draw for each other."""

    def __init__(self, sampling: GroupSampling, sampler: Sampler, numbers: Numbers, count: int) -> None:
        super().__init__(sampling.group, sampling.ranks, sampling.whole, sampler, numbers, count)
        self._sampling = sampling

    def begin(self, seeds: AnySeeds) -> None:
        check_sampler(self._sampler)
        self._fanouts = self._sampler.fanouts_of(self._whole)
        checked = self.checked(seeds)
        trees = None if checked.trees is None else [t.numpy() for t in checked.batch]
        self._seeds.append(checked)
        ids = [i.numpy() for i in checked.ids]
        self._nodes.append(_core.FoundNodes(self._sampler.threads, ids, trees))

    def draw(self, layer: int, error: Exception | None) -> list[list[Block]]:
        if not isinstance(self._sampler, RandomWalk):
            return self._assembled(self._draw(layer, error))
        place = partial(self.place, layer)
        walks = Walks(self._sampling, self._sampler, layer, self._numbers, place)
        return [[block] for block in walks.blocks(self._nodes, error)]

    def _draw(self, layer: int, error: Exception | None) -> list[list[_Drawn]]:
        """Ask the owners for the edges of all nodes found so far: by step and relation."""
        group, topology = self._group, self._whole

        def ask() -> list[list[torch.Tensor]]:
            if error is not None:
                raise error
            return self._requests(layer)

        # By type: nodes, and the number of them in each step; for trees what they draw by, and their times.
        asks = [torch.int64] * 4 * len(topology.node_types)
        asked = group.exchange(ask, asks, self.place(layer, "asks for edges"))
        # By relation: the number of edges of each node, their sources and ids, and weights.
        replies = [torch.int32, torch.int64, torch.int64, torch.float32] * len(topology.relations)
        answer = partial(self._answer, layer, asked)
        drawn = self._sorted(group.exchange(answer, replies, self.place(layer, "draws edges")))
        if self._sampler.draws_alone:
            return drawn
        return [self._draw_from(layer, step, lists) for step, lists in enumerate(drawn)]

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

    def _requests(self, layer: int) -> list[list[torch.Tensor]]:
        group, topology, counts = self._group, self._whole, self._sampling.counts
        messages: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
        self._orders: list[np.ndarray] = []  # by type
        self._sizes: list[list[int]] = []  # by type: nodes of each step
        drawing = {
            dst for (_, dst), fanout in zip(topology.ends, self._fanouts[layer], strict=True) if fanout
        }
        for t in range(len(topology.node_types)):
            nodes = [n.nodes(t) if t in drawing else np.empty(0, np.int64) for n in self._nodes]
            sizes = [len(n) for n in nodes]
            every = np.concatenate(nodes)
            owners = self._sampling.owners[t].of(every)
            dealt = Dealt(owners, group.size)
            steps = np.repeat(np.arange(len(nodes)), sizes)
            places = owners.astype(np.int64) * len(nodes) + steps
            asked = np.bincount(places, minlength=group.size * len(nodes)).reshape(group.size, len(nodes))
            self._orders.append(dealt.order)
            self._sizes.append(sizes)
            tags, times = self._tree_values(t) if t in drawing else (every, every)
            none = [torch.empty(0, dtype=torch.int64)] * group.size
            parts = [dealt.parts(v) if len(v) else none for v in (every, tags, times)]
            for message, ids, counted, *tree_values in zip(
                messages, parts[0], asked, *parts[1:], strict=True
            ):
                message += [ids, torch.from_numpy(counted), *tree_values]
            away = len(every) - int(dealt.counts[group.rank])
            counts["nodes asked"] += away
            counts["bytes sent"] += away * 8 * sum(1 for v in (every, tags, times) if len(v))
        return messages

    def _tree_values(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """What the tree of each node draws by, and the tree's time; empty without."""
        tags, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for seeds, nodes in zip(self._seeds, self._nodes, strict=True):
            if seeds.trees is not None:
                trees = nodes.trees(t)
                tags.append(seeds.trees.tags[trees].astype(np.int64))
                if seeds.trees.times is not None:
                    times.append(seeds.trees.times[trees])
        return np.concatenate(tags), np.concatenate(times)

    def _answer(self, layer: int, asked: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Draw for all ranks that ask."""
        sampling, samplers = self._sampling, self._sampling.drawing_for(self._sampler)
        if len(samplers) == 1:
            messages = self._draw_for(layer, asked, samplers[0])
        else:  # each rank has a mask of its own
            messages = []
            for sampler, sent in zip(samplers, asked, strict=True):
                messages += self._draw_for(layer, [sent], sampler)
        for rank, message in enumerate(messages):
            if rank != sampling.group.rank:
                sampling.counts["edges sent"] += sum(len(v) for v in message[1::4])
                sampling.counts["bytes sent"] += sum(v.nbytes for v in message)
        return messages

    def _draw_for(
        self, layer: int, asked: list[list[torch.Tensor]], sampler: LayeredSampler
    ) -> list[list[torch.Tensor]]:
        """The answers to some ranks, in the order of `asked`."""
        sampling, topology, trees = self._sampling, self._sampling.local, self._seeds[0].trees
        types, count = range(len(topology.node_types)), self._count
        by_type = [[[v.numpy() for v in sent[4 * t : 4 * t + 4]] for sent in asked] for t in types]
        # By type: nodes[rank, step], and where those of a step begin in what a rank sent.
        counts = [np.stack([sent[1] for sent in by_rank]) for by_rank in by_type]
        begins = [np.concatenate([np.zeros((len(c), 1), np.int64), c.cumsum(1)], axis=1) for c in counts]

        def asked_in(step: int, t: int, value: int) -> np.ndarray:
            ends = zip(by_type[t], begins[t][:, step], begins[t][:, step + 1], strict=True)
            return np.concatenate([sent[value][begin:end] for sent, begin, end in ends])

        steps = []
        for step in range(count):
            ids = [torch.from_numpy(asked_in(step, t, 0)) for t in types]
            if trees is None:
                steps.append(Given(ids))
                continue
            batch = [torch.arange(begin, end) for begin, end in pairwise(np.cumsum([0, *map(len, ids)]))]
            tags = np.concatenate([asked_in(step, t, 2) for t in types]).astype(np.uint32)
            times = np.concatenate([asked_in(step, t, 3) for t in types])
            steps.append(Given(ids, batch, Trees({}, {}, tags, None if trees.times is None else times)))
        if self._sampler.draws_alone:
            drawn = sampling.local_of(sampler).draw(topology, steps, layer, self._numbers)
        else:
            drawn = self._whole_lists(layer).draw(topology, steps, 0, self._numbers)
        self._weighted = [block.weights is not None for block in drawn[0]]
        messages: list[list[torch.Tensor]] = []
        for rank in range(len(asked)):
            message = []
            for r, (_, dst) in enumerate(topology.ends):
                firsts = counts[dst][:rank].sum(0)  # nodes of the ranks before, by step
                pieces = [
                    _part_of(drawn[step][r], int(firsts[step]), int(counts[dst][rank, step]))
                    for step in range(count)
                ]
                message += [torch.cat(values) for values in zip(*pieces, strict=True)]
            messages.append(message)
        return messages

    def _whole_lists(self, layer: int) -> Neighbor:
        """Draws all in-edges, for a sampler that looks at all nodes of a layer together."""
        relations, fanouts = self._sampling.local.relations, self._fanouts[layer]
        every = {r: -1 if fanout else 0 for r, fanout in zip(relations, fanouts, strict=True)}
        return Neighbor([every], threads=self._sampler.threads)

    def _sorted(self, answers: list[list[torch.Tensor]]) -> list[list[_Drawn]]:
        """The edges in the order of the nodes that asked."""
        topology = self._whole
        result: list[list[_Drawn]] = [[] for _ in self._seeds]
        for r, (_, dst) in enumerate(topology.ends):
            degrees, sources, ids, weights = (
                torch.cat([answer[4 * r + i] for answer in answers]).numpy() for i in range(4)
            )
            order = self._orders[dst]
            indptr = np.zeros(len(order) + 1, np.int64)
            indptr[1 + order] = degrees
            np.cumsum(indptr, out=indptr)
            to = ranges(indptr[order], degrees)
            arranged = []
            for values in (sources, ids, weights):
                out = np.empty(len(values), values.dtype)
                if len(values):
                    out[to] = values
                arranged.append(out)
            sources, ids, weights = arranged
            ends = np.cumsum([0, *self._sizes[dst]])
            for step, (begin, end) in enumerate(pairwise(ends)):
                first, last = int(indptr[begin]), int(indptr[end])
                result[step].append(
                    _Drawn(
                        indptr[begin : end + 1] - first,
                        sources[first:last],
                        ids[first:last],
                        weights[first:last] if self._weighted[r] else None,
                    )
                )
        return result

    def _assembled(self, drawn: list[list[_Drawn]]) -> list[list[Block]]:
        """Blocks by step and relation: the sources are numbered in the order in which one process does."""
        topology, assembled = self._whole, []
        for seeds, nodes, edges_by_relation in zip(self._seeds, self._nodes, drawn, strict=True):
            blocks = []
            known = [nodes.size(t) for t in range(len(topology.node_types))]
            for (src, dst), graph, edges in zip(
                topology.ends, topology.graphs, edges_by_relation, strict=True
            ):
                indptr, local = edges.indptr, edges.sources.copy()
                if len(indptr) - 1 < known[dst]:  # no relation of this layer draws from these nodes
                    indptr = np.zeros(known[dst] + 1, np.int64)
                trees = None
                if seeds.trees is not None:
                    trees = np.repeat(nodes.trees(dst)[: known[dst]], np.diff(indptr))
                nodes.relabel(src, local, trees)
                weights = None if edges.weights is None else torch.from_numpy(edges.weights.copy())
                blocks.append(
                    Block(
                        torch.from_numpy(indptr),
                        torch.from_numpy(local),
                        torch.from_numpy(edges.edge_ids.copy()),
                        0,
                        graph,
                        weights,
                    )
                )
            for block, (src, _) in zip(blocks, topology.ends, strict=True):
                block.num_src = nodes.size(src)
            assembled.append(blocks)
        return assembled


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
    if isinstance(sampler, Neighbor):
        if sampler.subgraph == "induced":
            raise ValueError(
                _NOT_DISTRIBUTED.format("subgraph='induced'", "'directional' or 'bidirectional'")
            )
        return
    if not isinstance(sampler, Labor | Ladies | RandomWalk):
        raise TypeError(_NOT_DISTRIBUTED.format(repr(sampler), "a sampler of gids.sampler"))


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
