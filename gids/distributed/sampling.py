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
from gids.distributed.group import Group
from gids.distributed.owners import Owners, split
from gids.distributed.steps import place_of
from gids.errors import FormatError
from gids.loader.ranks import Ranks
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.forest import AnySeeds, Given, Trees
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
        self.local, self.whole, self._owners = local, whole, list(owners)
        self._locals: weakref.WeakKeyDictionary[Any, LayeredSampler] = weakref.WeakKeyDictionary()
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
        return _Steps(self, sampler, (seed, epoch, first_step), len(seeds)).sample(seeds)

    def _by_layers(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]:
        """sample_steps() of a sampler that calls sample_layer() for every layer, and does more between, which
        can fail on one rank: an exchange at the end reports it to the others, wherever they are."""
        (seed, epoch, first), made = numbers, list[Minibatch]()
        group, failures, error = self.group, self.group.failures, None
        try:
            for step, of_step in enumerate(seeds, first):
                made.append(sampler.sample(self.whole, of_step, seed=seed, epoch=epoch, step=step))
        except Exception as raised:
            if group.failures > failures:  # sample_layer() raised it, on all ranks
                raise
            error = raised
        group.share_error(error, place_of(self.ranks.loader, epoch, first, f"sampled {len(seeds)} steps"))
        return made

    def sample_layer(
        self, sampler: LayeredSampler, seeds: AnySeeds, layer: int, *, seed: int, epoch: int, step: int
    ) -> Minibatch:
        """As LayeredSampler.sample_layer. Collective."""
        samplers = self._layers.setdefault(sampler, {})
        if layer not in samplers:
            arguments = sampler._arguments()
            numbers = arguments[sampler._numbers_are]
            samplers[layer] = type(sampler)(**{**arguments, sampler._numbers_are: [numbers[-1 - layer]]})
        [made] = self.sample_steps(
            samplers[layer], self.whole, [seeds], seed=seed, epoch=epoch, first_step=step
        )
        return made

    def of_copies(self, copies: Topology) -> GroupSampling:
        """The same for a topology with the same relations between types of other names."""
        pairs = list(zip(self.local.graphs, copies.graphs, strict=True))
        owners = dict(zip(self.whole.node_types, self._owners, strict=True))
        names = {c.relation[i]: g.relation[i] for g, c in pairs for i in (0, 2)}
        local = Topology([replace(g, relation=c.relation) for g, c in pairs])
        copied = [owners[names[t]] for t in copies.node_types]
        return GroupSampling(self.group, self.ranks, local, copies, copied, self.counts)

    def local_of(self, sampler: LayeredSampler) -> LayeredSampler:
        """The same sampler, with the weights of this part's edges."""
        if not isinstance(sampler, Neighbor) or sampler.weights is None:
            return sampler
        found = self._locals.get(sampler)
        if found is None:
            given = sampler.weights
            weights: Any = given if isinstance(given, Mapping) else {self.whole.relations[0]: given}
            held = {
                g.relation: weights[g.relation][g.edge_ids]
                for g in self.local.graphs
                if g.relation in weights
            }
            found = Neighbor(**{**sampler._arguments(), "weights": held})
            self._locals[sampler] = found
        return found


class _Steps:
    """The minibatches of some steps, while they are made. Lists are by step, then by node type."""

    def __init__(self, of: GroupSampling, sampler: Sampler, numbers: Numbers, count: int) -> None:
        self._of, self._numbers, self._count = of, numbers, count
        self._sampler = sampler
        self._given: list[Given] = []
        self._found: list[_core.FoundNodes] = []

    def sample(self, seeds: Sequence[AnySeeds]) -> list[Minibatch]:
        topology = self._of.whole
        layers: list[list[list[Block]]] = [[] for _ in seeds]
        count = len(getattr(self._sampler, "_per_layer", [0]))
        error: Exception | None = None  # the first exchange raises it, so that it reaches the other ranks
        try:
            self._begin(seeds)
        except Exception as raised:
            error = raised
        for layer in range(count):
            if isinstance(self._sampler, RandomWalk):
                self._walk(layer, error, layers)
            else:
                self._assemble(self._draw(layer, error), layers)
        sampler = self._own
        made = []
        for i, (given, found) in enumerate(zip(self._given, self._found, strict=True)):
            types = range(len(topology.node_types))
            nodes = [torch.from_numpy(found.nodes(t)) for t in types]
            trees = []
            if given.trees is not None:
                trees = [torch.from_numpy(found.trees(t).astype(np.int64)) for t in types]
            _, epoch, first = self._numbers
            made.append(sampler._minibatch(topology, given, (nodes, layers[i], trees), epoch, first + i))
        return made

    @property
    def _own(self) -> LayeredSampler:
        assert isinstance(self._sampler, LayeredSampler)
        return self._sampler

    def _begin(self, seeds: Sequence[AnySeeds]) -> None:
        check_sampler(self._sampler)
        sampler, topology = self._own, self._of.whole
        self._fanouts = sampler._fanouts_of(topology)
        for of_step in seeds:
            given = sampler._given(topology, of_step)
            for ids, ntype, count in zip(given.ids, topology.node_types, topology.node_counts, strict=True):
                wrong = ids[(ids < 0) | (ids >= count)]
                if len(wrong):
                    raise IndexError(
                        f"seed {int(wrong[0])} is not a {ntype!r} node: ids run from 0 to {count - 1}"
                    )
            trees = None if given.trees is None else [t.numpy() for t in given.batch]
            self._given.append(given)
            self._found.append(_core.FoundNodes(sampler.threads, [i.numpy() for i in given.ids], trees))

    def _place(self, layer: int, what: str) -> str:
        _, epoch, first = self._numbers
        return place_of(self._of.ranks.loader, epoch, first, f"{what} of layer {layer}, {self._count} steps")

    def _draw(self, layer: int, error: Exception | None) -> list[list[_Drawn]]:
        """Ask the owners for the edges of all nodes found so far: by step and relation."""
        group, topology = self._of.group, self._of.whole
        types, in_trees = range(len(topology.node_types)), False

        def ask() -> list[list[torch.Tensor]]:
            nonlocal in_trees
            if error is not None:
                raise error
            in_trees = self._given[0].trees is not None
            return self._requests(layer)

        # By type: nodes, and the number of them in each step; for trees what they draw by, and their times.
        dtypes = [torch.int64] * 4 * len(types)
        asked = group.exchange(ask, dtypes, self._place(layer, "asks for edges"))
        place = self._place(layer, "draws edges")
        answers = group.exchange(partial(self._answer, layer, asked), self._answer_dtypes(), place)
        drawn = self._sorted(answers)
        if self._lists is None:
            return drawn
        return [self._draw_from(layer, step, lists) for step, lists in enumerate(drawn)]

    def _whole_lists(self, layer: int) -> Neighbor | None:
        """What draws all in-edges, for a sampler that looks at all nodes of a layer together; else None."""
        self._lists: Neighbor | None = None
        if not draws_alone(self._sampler):
            relations = self._of.local.relations
            every = {
                r: -1 if fanout else 0 for r, fanout in zip(relations, self._fanouts[layer], strict=True)
            }
            self._lists = Neighbor([every], threads=self._own.threads)
        return self._lists

    def _draw_from(self, layer: int, step: int, lists: list[_Drawn]) -> list[_Drawn]:
        """Draw from the in-edges of all nodes of a layer."""
        seed, epoch, first = self._numbers
        of_relations = [(of.indptr, of.sources) for of in lists]
        blocks = self._own.draw_layer_from(self._of.whole, of_relations, layer, (seed, epoch, first + step))
        return [
            _Drawn(
                block.indptr.numpy(),
                block.indices.numpy(),
                of.edge_ids[block.positions.numpy()],
                None if block.weights is None else block.weights.numpy(),
            )
            for block, of in zip(blocks, lists, strict=True)
        ]

    def _walk(self, layer: int, error: Exception | None, layers: list[list[list[Block]]]) -> None:
        """Walk from all nodes found so far. The owner of the node where a walk is draws its next one."""
        whole, sampler = self._of.whole, self._sampler
        assert isinstance(sampler, RandomWalk)
        path = [] if error is not None else sampler._path_in(whole)
        t = 0 if error is not None else whole.ends[path[0]][1]
        nodes = [found.nodes(t) for found in self._found] if error is None else []
        each, width = sampler.num_walks * sampler.walk_length, 1 + len(sampler.metapath or [0])
        seed, epoch, first = self._numbers
        starts = [np.repeat(ids, sampler.num_walks) for ids in nodes]
        at = [ids.copy() for ids in starts]
        visited = [np.full((len(ids), each), -1) for ids in nodes]
        for step in range(sampler.walk_length):
            # Numbers of draws are counted walk after walk.
            draws = [
                np.tile((np.arange(sampler.num_walks) * sampler.walk_length + step) * width, len(ids))
                for ids in nodes
            ]
            for i, of_step in enumerate(draws if step else []):
                back = np.empty(len(of_step), np.bool_)
                numbers = seed, epoch, first + i
                _core.restart_walks(numbers, layer, sampler.restart, starts[i], of_step, back)
                at[i][back] = starts[i][back]
            alive = [np.arange(len(of_step)) for of_step in draws]
            for hop in range(width - 1):
                walks = [(starts[i][a], draws[i][a] + 1 + hop, at[i][a]) for i, a in enumerate(alive)]
                for i, moved in enumerate(self._hop(layer, path, hop, walks, error)):
                    at[i][alive[i]] = moved
                    alive[i] = alive[i][moved >= 0]
            for i, of_step in enumerate(at):
                of_step[of_step < 0] = starts[i][of_step < 0]  # from a dead end a walk goes back
                went = np.where(of_step == starts[i], -1, of_step)
                visited[i][:, step :: sampler.walk_length] = went.reshape(len(nodes[i]), sampler.num_walks)
        for i, found in enumerate(self._found):
            indptr = np.empty(len(nodes[i]) + 1, np.int64)
            flat = visited[i].ravel()
            sources, shares = np.empty(len(flat), np.int64), np.empty(len(flat), np.float32)
            count = _core.rank_walks(flat, each, self._fanouts[layer][0], indptr, sources, shares)
            local = sources[:count].copy()
            found.relabel(t, local)
            block = Block(
                torch.from_numpy(indptr),
                torch.from_numpy(local),
                torch.full((count,), -1),
                found.size(t),
                whole.graphs[path[0]],
                torch.from_numpy(shares[:count].copy()),
            )
            layers[i].append([block])

    def _hop(
        self,
        layer: int,
        path: list[int],
        hop: int,
        walks: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
        error: Exception | None,
    ) -> list[np.ndarray]:
        """Where walks go next, by step; -1 in a dead end. walks: by step (starts, draws, nodes)."""
        of, group, count = self._of, self._of.group, self._count
        orders: list[np.ndarray] = []

        def ask() -> list[list[torch.Tensor]]:
            if error is not None:
                raise error
            messages: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
            owners = of._owners[of.whole.ends[path[hop]][1]]
            for of_step in walks:
                order, counts = split(owners.of(of_step[2]), group.size)
                orders.append(order)
                ends = np.cumsum([0, *counts])
                for rank, (begin, end) in enumerate(pairwise(ends)):
                    messages[rank] += [torch.from_numpy(v[order[begin:end]]) for v in of_step]
                    if rank != group.rank:
                        of.counts["nodes asked"] += int(end - begin)
                        of.counts["bytes sent"] += 24 * int(end - begin)
            return messages

        def answer() -> list[list[torch.Tensor]]:
            seed, epoch, first = self._numbers
            messages: list[list[torch.Tensor]] = []
            for rank, of_rank in enumerate(asked):
                messages.append([])
                for i in range(count):
                    starts, draws, at = (v.numpy() for v in of_rank[3 * i : 3 * i + 3])
                    moved, numbers = np.empty(len(at), np.int64), (seed, epoch, first + i)
                    try:
                        _core.hop_walks(of.local.native, path[hop], numbers, layer, starts, draws, at, moved)
                    except _core.BadTopology as bad:
                        raise FormatError(str(bad)) from None
                    messages[-1].append(torch.from_numpy(moved))
                    if rank != group.rank:
                        of.counts["edges sent"] += len(moved)
                        of.counts["bytes sent"] += moved.nbytes
            return messages

        asked = group.exchange(ask, [torch.int64] * 3 * count, self._place(layer, f"asks for hop {hop}"))
        answers = group.exchange(answer, [torch.int64] * count, self._place(layer, f"draws hop {hop}"))
        moved = []
        for i, order in enumerate(orders):
            came = np.empty(len(order), np.int64)
            came[order] = np.concatenate([of_rank[i].numpy() for of_rank in answers])
            moved.append(came)
        return moved

    def _requests(self, layer: int) -> list[list[torch.Tensor]]:
        group, topology = self._of.group, self._of.whole
        messages: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
        self._orders: list[np.ndarray] = []
        self._asked: list[np.ndarray] = []  # by type: nodes[rank, step]
        self._sizes: list[list[int]] = []  # by type: nodes of each step
        for t in range(len(topology.node_types)):
            drawing = any(
                fanout and topology.ends[r][1] == t for r, fanout in enumerate(self._fanouts[layer])
            )
            nodes = [f.nodes(t) if drawing else np.empty(0, np.int64) for f in self._found]
            sizes = [len(n) for n in nodes]
            every = np.concatenate(nodes)
            owners = self._of._owners[t].of(every)
            order, _ = split(owners, group.size)
            steps = np.repeat(np.arange(len(nodes)), sizes)
            asked = np.bincount(
                owners.astype(np.int64) * len(nodes) + steps, minlength=group.size * len(nodes)
            )
            asked = asked.reshape(group.size, len(nodes))
            self._orders.append(order)
            self._asked.append(asked)
            self._sizes.append(sizes)
            sent = [every[order], *self._tree_values(t, drawing, order)]
            begins = np.concatenate([[0], asked.sum(1).cumsum()])
            for rank, (begin, end) in enumerate(pairwise(begins)):
                messages[rank] += [torch.from_numpy(values[begin:end]) for values in sent[:1]]
                messages[rank].append(torch.from_numpy(asked[rank]))
                messages[rank] += [torch.from_numpy(v[begin:end] if len(v) else v) for v in sent[1:]]
                if rank != group.rank:
                    self._of.counts["nodes asked"] += int(end - begin)
                    self._of.counts["bytes sent"] += int(end - begin) * 8 * sum(1 for v in sent if len(v))
        return messages

    def _tree_values(self, t: int, drawing: bool, order: np.ndarray) -> list[np.ndarray]:
        """Of each node, what its tree draws by, and the tree's time; empty without."""
        none = np.empty(0, np.int64)
        if self._given[0].trees is None or not drawing:
            return [none, none]
        tags, times = [], []
        for given, found in zip(self._given, self._found, strict=True):
            trees = given.trees
            assert trees is not None
            of_nodes = found.trees(t)
            tags.append(trees.tags[of_nodes].astype(np.int64))
            if trees.times is not None:
                times.append(trees.times[of_nodes])
        return [np.concatenate(tags)[order], np.concatenate(times)[order] if times else none]

    def _answer_dtypes(self) -> list[torch.dtype]:
        """By relation: the number of edges of each node, their sources and ids, and weights."""
        return [torch.int32, torch.int64, torch.int64, torch.float32] * len(self._of.whole.relations)

    def _answer(self, layer: int, asked: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Draw for all ranks that ask."""
        of, topology = self._of, self._of.local
        types, count = range(len(topology.node_types)), len(self._given)
        by_type = [[[v.numpy() for v in of_rank[4 * t : 4 * t + 4]] for of_rank in asked] for t in types]
        # By type: nodes[rank, step], and where those of a step begin in what a rank sent.
        counts = [np.stack([of_rank[1] for of_rank in of_type]) for of_type in by_type]
        begins = [np.concatenate([np.zeros((len(c), 1), np.int64), c.cumsum(1)], axis=1) for c in counts]

        def of_step(t: int, step: int, value: int) -> np.ndarray:
            parts = [
                of_rank[value][begins[t][r, step] : begins[t][r, step + 1]]
                if len(of_rank[value])
                else of_rank[value]
                for r, of_rank in enumerate(by_type[t])
            ]
            return np.concatenate(parts)

        sampler, steps = self._whole_lists(layer) or of.local_of(self._own), []
        for step in range(count):
            ids = [torch.from_numpy(of_step(t, step, 0)) for t in types]
            if self._given[0].trees is None:
                steps.append(Given(ids))
                continue
            sizes = [len(i) for i in ids]
            ends = np.cumsum([0, *sizes])
            batch = [torch.arange(begin, end) for begin, end in pairwise(ends)]
            tags = np.concatenate([of_step(t, step, 2) for t in types]).astype(np.uint32)
            times = np.concatenate([of_step(t, step, 3) for t in types])
            trees = Trees({}, {}, tags, times if self._given[0].trees.times is not None else None)
            steps.append(Given(ids, batch, trees))
        drawn = sampler.draw_layer(topology, steps, layer if sampler is not self._lists else 0, self._numbers)
        messages: list[list[torch.Tensor]] = []
        for rank in range(of.group.size):
            message = []
            for r, (_, dst) in enumerate(topology.ends):
                firsts = counts[dst][:rank].sum(0)  # nodes of the ranks before, by step
                pieces = [
                    _part_of(drawn[step][r], int(firsts[step]), int(counts[dst][rank, step]))
                    for step in range(count)
                ]
                message += [torch.cat(values) for values in zip(*pieces, strict=True)]
            if rank != of.group.rank:
                of.counts["edges sent"] += sum(len(v) for v in message[1::4])
                of.counts["bytes sent"] += sum(v.nbytes for v in message)
            messages.append(message)
        return messages

    def _sorted(self, answers: list[list[torch.Tensor]]) -> list[list[_Drawn]]:
        """The edges in the order of the nodes that asked."""
        topology, weighted = self._of.whole, self._weighted()
        result: list[list[_Drawn]] = [[] for _ in self._given]
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
                        weights[first:last] if weighted[r] else None,
                    )
                )
        return result

    def _weighted(self) -> list[bool]:
        """By relation: whether edges have weights."""
        count, sampler = len(self._of.whole.relations), self._sampler
        if not isinstance(sampler, Neighbor):
            return [self._lists is None] * count
        given = [*sampler._weights_of(self._of.whole), *[None] * count]
        near = [*sampler._masks_of(self._of.whole)[0], *[None] * count]
        return [given[r] is not None or near[r] is not None for r in range(count)]

    def _assemble(self, drawn: list[list[_Drawn]], layers: list[list[list[Block]]]) -> None:
        """Number the sources, in the order in which one process does."""
        topology = self._of.whole
        for step, (found, of_step) in enumerate(zip(self._found, drawn, strict=True)):
            blocks = []
            known = [found.size(t) for t in range(len(topology.node_types))]
            for (src, dst), graph, edges in zip(topology.ends, topology.graphs, of_step, strict=True):
                indptr, local = edges.indptr, edges.sources.copy()
                if len(indptr) - 1 < known[dst]:  # no relation of this layer draws from these nodes
                    indptr = np.zeros(known[dst] + 1, np.int64)
                trees = None
                if self._given[step].trees is not None:
                    trees = np.repeat(found.trees(dst)[: known[dst]], np.diff(indptr))
                found.relabel(src, local, trees)
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
                block.num_src = found.size(src)
            layers[step].append(blocks)


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


def draws_alone(sampler: Sampler) -> bool:
    """Whether a node draws its edges without a look at the other nodes of its layer."""
    if isinstance(sampler, Labor):
        return sampler.importance_sampling == 0
    return isinstance(sampler, Neighbor) and sampler.subgraph != "induced"


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
    positions, of_graph = block.positions[edges], block.graph.edge_ids
    if of_graph is None:
        return positions
    return torch.from_numpy(of_graph[positions.numpy()].astype(np.int64, copy=False))


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, … (lengths[0] numbers), begins[1], …"""
    lengths = lengths.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(lengths.sum())
