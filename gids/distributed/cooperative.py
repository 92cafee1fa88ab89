"""Cooperative minibatches: all ranks work on one large minibatch. Each node belongs to one rank, its owner.

Called by GroupSource for NodeLoader(cooperative=True). After Balin, LaSalle and Catalyurek, "Cooperative
Minibatching in Graph Neural Networks", 2023, Algorithm 1. A node that several ranks would sample, read and
compute for themselves is sampled, read and computed once. Between layers, ranks send each other the rows that
they need of nodes of others: `CooperativeMinibatch.exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.distributed.collective import CollectiveSampling, LayeredSteps
from gids.distributed.owners import Dealt, Owners
from gids.distributed.sampling import OURS, GroupSampling, edge_ids_at, has_own_sample, ranges
from gids.loader.ranks import Group, Ranks, Tensors, place_of
from gids.loader.sampling import sample_steps
from gids.sampler import Block, Minibatch, Neighbor, RandomWalk, Sampler, Topology
from gids.sampler.forest import AnySeeds, Given, per_type
from gids.sampler.layered import LayeredSampler, Numbers
from gids.sampler.minibatch import PerType


@dataclass(frozen=True)
class Exchange:
    """How rows of one node type go from the owners of nodes to the ranks whose edges begin at them.

    rows: nodes of the layer that this rank owns. num_dst: sources that are destinations, too: they are the
    owner's first rows. send: int64[n], the rows that other ranks and this one want, those for rank 0 first.
    counts: of them, for each rank. expected: rows that come from each rank. place: int64[sum of expected],
    for each further source its row among those that come.
    """

    rows: int
    num_dst: int
    send: torch.Tensor
    counts: list[int]
    expected: list[int]
    place: torch.Tensor


@dataclass(repr=False)
class CooperativeMinibatch(Minibatch):
    """This rank's part of a minibatch of all ranks.

    seeds: those of the minibatch that this rank owns, perhaps none. input_nodes: the nodes of the input layer
    that it owns, each once; their features are loaded. blocks: as of Minibatch. The destinations of blocks[i]
    are the nodes of layer i + 1 that this rank owns, and come first among its sources, which exchange(i, h)
    returns rows of.

    seed_count: seeds of all ranks. exchanges: by layer and node type, the input layer first. group: the ranks
    that it exchanges with. loader: see place_of().
    """

    seed_count: int = 0
    exchanges: list[list[Exchange]] = field(default_factory=list)
    node_types: list[str] = field(default_factory=list)
    group: Group | None = None
    loader: int = 0

    def exchange(self, layer: int, h: PerType) -> PerType:
        """Rows of the sources of blocks[layer], from rows of the nodes that the ranks own. Collective.

        h: float[n, ...], a row for each of this rank's nodes of that layer, which are input_nodes for layer 0
        and the destinations of blocks[layer - 1] for others; or a dictionary of these by node type. Returns
        the same with a row for each source of blocks[layer]. Differentiable: gradients go back to the owners.
        Every rank must call it, in forward and backward. Raises TypeError for what is no tensor, ValueError
        for an unknown node type and for another number of rows, and the other ranks RankError; RankError on
        every rank if the rows of one have another shape, dtype or device type, or if ranks are at different
        layers or minibatches.
        """
        assert self.group is not None
        error: Exception | None = None
        plans: list[tuple[str, Exchange, torch.Tensor]] = []
        try:
            plans = list(self._plans(layer, h))
        except Exception as raised:
            error = raised
        rows = ", ".join(f"{t} {list(v.shape[1:])} {v.dtype} {v.device.type}".strip() for t, _, v in plans)
        place = place_of(self.loader, self.epoch, self.step, f"exchange({layer}, h) of {rows}")
        self.group.meet(place, error)
        send: Callable[..., torch.Tensor] = _Exchanged.apply
        came = {t: send(values, plan, self.group, f"{place} {t}") for t, plan, values in plans}
        return came if isinstance(h, dict) else came[""]

    def _plans(self, layer: int, h: PerType) -> Iterator[tuple[str, Exchange, torch.Tensor]]:
        """By node type: how its rows are exchanged, and the rows. Raises ValueError for wrong rows."""
        types = self.node_types
        if not isinstance(h, dict) and len(types) > 1:
            raise ValueError(f"exchange({layer}, h): give h as a dictionary by node type: {', '.join(types)}")
        if isinstance(h, dict) and (unknown := [t for t in h if t not in types]):
            raise ValueError(f"exchange({layer}, h): no node type {unknown[0]!r} (has {', '.join(types)})")
        for ntype, plan in zip(types, self.exchanges[layer], strict=True):
            name = ntype if isinstance(h, dict) else ""
            values = h.get(ntype) if isinstance(h, dict) else h
            if values is None and name:
                continue
            if not isinstance(values, torch.Tensor):
                raise TypeError(f"exchange({layer}, h): give h as a tensor, not as a {type(values).__name__}")
            if len(values) != plan.rows:
                raise ValueError(
                    f"exchange({layer}, h): h{f'[{name!r}]' if name else ''} has {len(values)} rows, "
                    f"and this rank owns {plan.rows} nodes of the layer: give each one its row, in order"
                )
            yield name, plan, values


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, plan: Exchange, group: Group, place: str) -> torch.Tensor:
        ctx.plan, ctx.group, ctx.rows, ctx.place = plan, group, len(h), place
        came = _send(h.index_select(0, plan.send.to(h.device)), plan.counts, plan.expected, group)
        rows = h.new_empty(plan.num_dst + len(plan.place), *h.shape[1:])
        rows[: plan.num_dst] = h[: plan.num_dst]
        torch.index_select(came, 0, plan.place.to(h.device), out=rows[plan.num_dst :])
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        plan: Exchange = ctx.plan
        back = torch.empty_like(grad[plan.num_dst :])
        back[plan.place.to(grad.device)] = grad[plan.num_dst :]
        ctx.group.meet(f"{ctx.place}, backward")
        came = _send(back, plan.expected, plan.counts, ctx.group)
        result = grad.new_zeros(ctx.rows, *grad.shape[1:])
        result[: plan.num_dst] = grad[: plan.num_dst]
        result.index_add_(0, plan.send.to(grad.device), came)
        return result, None, None, None


def _send(rows: torch.Tensor, counts: list[int], expected: list[int], group: Group) -> torch.Tensor:
    """Send rows of any type and shape, those for rank 0 first. Returns those that come."""
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    stored = rows.contiguous().view(-1).view(torch.uint8).view(len(rows), row_bytes)
    came, handle = group.start_rows(stored, counts, expected)
    group.wait_for(handle)
    return came.view(-1).view(rows.dtype).view(len(came), *rows.shape[1:])


class Cooperation(CollectiveSampling):
    """Samples cooperative minibatches: of each, this rank's part. Seeds are those of all ranks.

    divided: where this rank has a part of the edges, samples minibatches of all ranks' seeds for samplers
    that look at all nodes of a layer together; None: the sampler does. column, columns: the ranks of each
    column work on a part of every step's seeds together.
    """

    def __init__(
        self,
        group: Group,
        ranks: Ranks,
        whole: Topology,
        owners: Sequence[Owners],
        *,
        divided: GroupSampling | None,
        column: int,
        columns: int,
    ) -> None:
        super().__init__(group, ranks, whole, owners)
        self.divided, self.column, self.columns = divided, column, columns

    def _sample(self, sampler: Sampler, seeds: Sequence[AnySeeds], numbers: Numbers) -> list[Minibatch]:
        return _CooperativeSteps(self, sampler, numbers, len(seeds)).sample(seeds)


class _CooperativeSteps(LayeredSteps):
    """Steps of which each rank makes the part of the nodes that it owns."""

    def __init__(self, cooperation: Cooperation, sampler: Sampler, numbers: Numbers, count: int) -> None:
        super().__init__(cooperation, sampler, numbers, count)
        self._cooperation = cooperation
        self._ends = self._whole.ends  # of the relations that blocks have
        self._column_seeds: list[PerType] = []
        self._seed_counts: list[int] = []
        self._exchanges: list[list[list[Exchange]]] = [[] for _ in range(count)]
        self._whole_layers: list[_WholeLayers] = []

    def begin(self, seeds: AnySeeds) -> None:
        cooperation, sampler, whole = self._cooperation, self._sampler, self._whole
        if not isinstance(sampler, LayeredSampler) or has_own_sample(sampler):
            raise TypeError(f"cooperative=True needs {OURS} (got {type(sampler).__name__})")
        if isinstance(sampler, Neighbor) and (sampler.disjoint or sampler.subgraph != "directional"):
            raise ValueError(
                f"cooperative=True with {sampler!r}: trees of different seeds share no nodes, and subgraphs "
                "have no layers to exchange between. Leave cooperative out"
            )
        if isinstance(sampler, RandomWalk):
            start = whole.ends[sampler.path_in(whole)[0]][1]
            self._ends = [(start, start)]
        column, columns = cooperation.column, cooperation.columns
        every = self.checked(seeds).ids
        part = [ids[len(ids) * column // columns : len(ids) * (column + 1) // columns] for ids in every]
        own = [
            ids[torch.from_numpy(owners(ids.numpy()) == self._group.rank)]
            for ids, owners in zip(part, self._owners, strict=True)
        ]
        self._column_seeds.append(per_type(whole, part))
        self._seeds.append(Given(own))
        self._seed_counts.append(sum(map(len, every)))
        self._nodes.append(_core.FoundNodes(sampler.threads, [ids.numpy() for ids in own]))
        if len(self._seeds) == self._count and not sampler.draws_alone:
            seed, epoch, first = self._numbers
            sample = sample_steps if cooperation.divided is None else cooperation.divided.sample_steps
            made = sample(sampler, whole, self._column_seeds, seed=seed, epoch=epoch, first_step=first)
            self._whole_layers = [_WholeLayers(whole, self._ends, m, sampler.threads) for m in made]

    def finish(self, step: int, layers: list[list[Block]]) -> Minibatch:
        return CooperativeMinibatch(
            **vars(super().finish(step, layers)),
            seed_count=self._seed_counts[step],
            exchanges=self._exchanges[step][::-1],
            node_types=self._whole.node_types,
            group=self._group,
            loader=self._loader,
        )

    def _edges(self, layer: int, nodes: list[list[np.ndarray]]) -> list[list[Block]]:
        """By step and relation: the edges of this rank's nodes. Indices are node ids, positions edge ids."""
        if self._whole_layers:
            return [w.draw(layer, by_type) for w, by_type in zip(self._whole_layers, nodes, strict=True)]
        divided, sampler, topology = self._cooperation.divided, self._sampler, self._whole
        if divided is not None:
            sampler, topology = divided.drawing_for(sampler)[self._group.rank], divided.local
        drawing = [Given([torch.from_numpy(ids) for ids in by_type]) for by_type in nodes]
        drawn = sampler.draw(topology, drawing, layer, self._numbers)
        for blocks in drawn:
            for block, graph in zip(blocks, self._whole.graphs, strict=True):
                if divided is not None:
                    block.positions = edge_ids_at(block)
                block.graph = graph
        return drawn

    def draw(self, layer: int) -> list[list[Block]]:
        """Draw one layer, and ask the owners of its sources to be ready with their rows."""
        group, types = self._group, range(len(self._whole.node_types))
        nodes: list[list[np.ndarray]] = []
        further: list[list[Dealt]] = []  # by step and type: sources that draw nothing here
        drawn: list[list[Block]] = []

        def ask() -> Tensors:
            nodes.extend([owned.nodes(t) for t in types] for owned in self._nodes)
            drawn.extend(self._edges(layer, nodes))
            messages = []
            for blocks, destinations in zip(drawn, nodes, strict=True):
                sources = _core.FoundNodes(self._sampler.threads, destinations)
                for block, (src, _) in zip(blocks, self._ends, strict=True):
                    local = block.indices.numpy().copy()
                    sources.relabel(src, local)
                    block.indices = torch.from_numpy(local)
                for block, (src, _) in zip(blocks, self._ends, strict=True):
                    block.num_src = sources.size(src)
                further.append([])
                for t in types:
                    ids = sources.nodes(t)[len(destinations[t]) :]
                    further[-1].append(Dealt(self._owners[t](ids), group.size))
                    messages.append(further[-1][t].parts(ids))
            return messages

        # The number of steps is the same on all ranks.
        asked = group.exchange(
            ask, [torch.int64] * len(types) * self._count, self.place(layer, "asks for sources")
        )
        for step, owned in enumerate(self._nodes):
            plans = []
            for t in types:
                by_rank = [ids.numpy() for ids in asked[step * len(types) + t]]
                wanted = np.concatenate(by_rank)
                owned.relabel(t, wanted)
                plans.append(
                    Exchange(
                        owned.size(t),
                        len(nodes[step][t]),
                        torch.from_numpy(wanted),
                        [len(ids) for ids in by_rank],
                        further[step][t].counts.tolist(),
                        further[step][t].inverse().long(),
                    )
                )
            self._exchanges[step].append(plans)
        return drawn


class _WholeLayers:
    """A minibatch of all ranks' seeds, from which the edges of some nodes are taken. ends: of the relations
    that its blocks have."""

    def __init__(
        self, whole: Topology, ends: Sequence[tuple[int, int]], minibatch: Minibatch, threads: int
    ) -> None:
        self._ends = ends
        nodes = minibatch.input_nodes
        self._nodes = [(nodes[t] if isinstance(nodes, dict) else nodes).numpy() for t in whole.node_types]
        # Repeated seeds have several rows, with the same edges; the first one is found.
        self._found = _core.FoundNodes(threads, self._nodes)
        layers: list[Any] = minibatch.blocks[::-1]
        self._layers: list[list[Block]] = [
            list(layer.values()) if isinstance(layer, dict) else [layer] for layer in layers
        ]

    def draw(self, layer: int, nodes: list[np.ndarray]) -> list[Block]:
        taken = []
        for block, (src, dst) in zip(self._layers[layer], self._ends, strict=True):
            rows = nodes[dst].copy()
            self._found.relabel(dst, rows)
            indptr = block.indptr.numpy()
            degrees = indptr[rows + 1] - indptr[rows]
            edges = ranges(indptr[rows], degrees)
            taken.append(
                Block.of_arrays(
                    np.concatenate([[0], degrees.cumsum()]),
                    self._nodes[src][block.indices.numpy()[edges]],
                    block.positions.numpy()[edges],
                    None if block.weights is None else block.weights.numpy()[edges],
                    0,
                    block.graph,
                )
            )
        return taken
