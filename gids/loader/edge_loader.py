"""EdgeLoader: seed edges of a relation, uniform negatives, and a sampler, for link prediction.

The user makes it to train on edges. EpochLoader does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch

from gids.cuda import on_host
from gids.errors import MissingError
from gids.loader.epoch_loader import EpochLoader, check_order, check_range
from gids.loader.options import Size, explain_names
from gids.loader.row_source import RowSource, Tables
from gids.loader.sampling import Epoch, EpochSampling, StepSeeds
from gids.loader.source import Dataset
from gids.sampler import Block, Minibatch, Sampler, TimedSeeds, Topology
from gids.sampler.forest import AnySeeds
from gids.sampler.layered import Fanout
from gids.sampler.neighbor import Strategy
from gids.store import Graph
from gids.store.names import Relation, describe_type


@dataclass(repr=False)
class EdgeMinibatch(Minibatch):
    """A Minibatch whose seeds are the ends of edges.

    seeds: each end once, ascending, by type if the minibatch is heterogeneous. pairs: int64[2, n], source and
    destination of each pair as positions among the seeds of their types, which are rows of the last layer's
    output: first the positive_count seed edges, then the negatives of the first edge, of the second, …
    labels: float32[n], 1 for seed edges and 0 for negatives.

    With times, seeds are pairs of a node and a time: each once, ascending, with `times`; so every end is
    embedded at the time of its edge.
    """

    pairs: torch.Tensor = field(default_factory=lambda: torch.empty((2, 0), dtype=torch.int64))
    positive_count: int = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        yield self.pairs


class EdgeLoader(EpochLoader):
    """Minibatches for training on edges: ends sampled from a store's topology, features through a cache.

    Args:
        source: gids.open(...), or a path or FeatureStore for default options; or a list of these.
        edges: edges to train on: int64[2, n], sources and destinations; need not be in the topology. They are
            copied. None: all edges of the relation. In place of relation=: (relation, one of these),
            or a mapping with one entry.
        sampler: fanouts (one per layer, the last one applies to the ends of the seed edges), or a sampler
            that makes blocks.
        time: the time of each seed edge, int64[n]; with edges=None by edge id (in a dataset without edge ids
            in the order of graph.indices). A negative has the time of its seed edge. Minibatches are then
            temporal, as with time in gids.NodeLoader. None: the edges' own times, if edges is None and the
            dataset has times of them. False: not temporal; a temporal sampler is refused. Edges with the same
            time as the seed edge, and the seed edge itself, may be drawn: to leave them out, give times less
            1, or exclude.
        strategy: as in gids.NodeLoader.
        relation: (source type, relation, destination type) of the edges; may be left out if there is one.
        negatives: number of pairs per seed edge with its source and a uniformly drawn destination (default
            1). A pair may be an edge by chance.
        exclude: leave out of the blocks the edges that would reveal the answer: ``"self"``: the step's seed
            edges, of all ranks; ``"reverse"``: also their reverses. Parallel edges are left out, too, and
            the reverses that a bidirectional subgraph makes from these edges. Blocks may then have input
            nodes without edges. Not with RandomWalk, whose walks may pass over a seed edge.
        reverse: the relation of the reverses. None: the same relation, if both ends have one type.
        batch_size: number of seed edges, without negatives, on each rank (default 1024).
        tables, shuffle, drop_last, seed, rank, world_size, device, topology_on, dtype, minibatch_rows,
            pin_memory, memory: as in gids.NodeLoader.

    Minibatches are EdgeMinibatches: of tensors if the dataset has one node type and one relation, else of
    dictionaries. Epochs, determinism, ``state_dict()`` and errors are as in gids.NodeLoader. Memory: 16 bytes
    per given edge, and 8 per seed edge for the order of an epoch.
    """

    @explain_names("gids.EdgeLoader", of_torch=True)
    def __init__(
        self,
        source: RowSource | Dataset | Sequence[Dataset],
        edges: torch.Tensor | tuple[Relation, torch.Tensor | None] | None,
        sampler: Sampler | Sequence[Fanout],
        *,
        time: torch.Tensor | Literal[False] | None = None,
        strategy: Strategy | None = None,
        relation: Relation | None = None,
        negatives: int = 1,
        exclude: Literal["self", "reverse"] | None = None,
        reverse: Relation | None = None,
        tables: Tables | None = None,
        batch_size: int = 1024,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device = "cpu",
        topology_on: str = "auto",
        dtype: torch.dtype | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        pin_memory: bool = False,
        memory: Size | None = None,
    ) -> None:
        check_order("gids.EdgeLoader(source, edges, fanouts)", sampler)
        super().__init__(
            source,
            sampler,
            memory=memory,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        if isinstance(edges, Mapping) and len(edges) == 1:
            [edges] = edges.items()
        if isinstance(edges, tuple) and len(edges) == 2 and isinstance(edges[0], tuple):
            if relation not in (None, edges[0]):
                raise ValueError(f"edges are of {describe_type(edges[0])}, and relation={relation}: give one")
            relation, edges = edges
        if edges is None and self.store.part is not None:
            raise ValueError(
                "edges=None does not work with a partitioned dataset, of which no rank has all edges: give "
                "the seed edges"
            )
        if isinstance(negatives, bool) or not isinstance(negatives, int) or negatives < 0:
            raise ValueError(f"negatives={negatives!r} must be a whole number, 0 or more")
        if exclude not in (None, "self", "reverse"):
            raise ValueError(f"exclude={exclude!r} must be None, 'self' or 'reverse'")
        ends = {(g.relation[0], g.relation[2]) for g in self._graphs}
        one = len(self._graphs) == 1 and all(src == dst for src, dst in ends)
        topology = Topology(self._graphs[0] if one else self._graphs)
        self._graph = self._graph_of(relation)
        self.relation: Relation = self._graph.relation
        self.negatives, self.exclude = negatives, exclude
        self._reverse = self._reverse_of(reverse) if exclude == "reverse" else None
        own = time is None and edges is None and self._graph.edge_times is not None
        temporal = getattr(self.sampler, "temporal", None) is not None
        if own and self._fanouts is None:
            own = temporal
        timed = own or isinstance(time, torch.Tensor)
        if time is not None and time is not False and not timed:
            raise TypeError(f"time is {type(time).__name__}: give int64[n], one for each edge, None or False")
        if time is False and temporal:
            raise ValueError(
                f"time=False: {self.sampler!r} samples by time: leave temporal= out of the sampler"
            )
        self._time = "own" if own else "given" if timed else None
        if timed:
            self._use_times(strategy)
        elif strategy is not None:
            raise ValueError(f"strategy={strategy!r} needs times of the edges: give time=")
        self._edges = _Edges(self._graph, edges, time if isinstance(time, torch.Tensor) else None, own=own)
        self._seed_ids = self._edges.ids
        self._open(topology, tables, device, topology_on, dtype, minibatch_rows, pin_memory=pin_memory)

    @property
    def _seed_count(self) -> int:
        return self._edges.count

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        self._edges.hash(update)

    def _made_with(self) -> dict[str, Any]:
        mine = {
            "relation": list(self.relation),
            "negatives": self.negatives,
            "exclude": self.exclude,
            "reverse": list(self._reverse) if self._reverse else None,
            "time": self._time,
        }
        return super()._made_with() | mine

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        excluded = [(self.relation, False)] if self.exclude else []
        if self._reverse is not None:
            excluded.append((self._reverse, True))
        return _EdgeSampling(epoch, self._edges, self._graph, self.negatives, excluded)

    def _graph_of(self, relation: Relation | None) -> Graph:
        known = {g.relation: g for g in self._graphs}
        if isinstance(relation, list):
            relation = tuple(relation)
        if relation is None and len(known) == 1:
            return self._graphs[0]
        graph = known.get(relation) if relation is not None else None
        if graph is None:
            names = ", ".join(map(describe_type, known))
            asked = "relation is not given" if relation is None else f"no topology of {relation}"
            raise MissingError(f"{asked}: {self.store.name} has {names}")
        return graph

    def _reverse_of(self, reverse: Relation | None) -> Relation:
        src, _, dst = self.relation
        if reverse is None and src == dst:
            return self.relation
        known = {g.relation for g in self._graphs}
        if reverse is None or reverse not in known or (reverse[0], reverse[2]) != (dst, src):
            raise ValueError(
                f"reverse={reverse}; with exclude='reverse', give the relation from {dst!r} to {src!r} that "
                f"holds the reverses of {describe_type(self.relation)}"
            )
        return reverse


class _EdgeSampling(EpochSampling):
    """excluded: relations whose blocks leave the seed edges out, and whether they hold the reverses."""

    def __init__(
        self,
        epoch: Epoch,
        edges: _Edges,
        graph: Graph,
        negatives: int,
        excluded: Sequence[tuple[Relation, bool]],
    ) -> None:
        super().__init__(epoch)
        self._edges, self._graph, self._negatives, self._excluded = edges, graph, negatives, excluded

    def draw(self, step: int) -> tuple[AnySeeds, Callable[[Minibatch], Minibatch]]:
        seeds = self.epoch.seeds.at(step)
        nodes, pairs = self._ends(seeds, step)
        return nodes, partial(self._finish, pairs, seeds)

    def _ends(self, seeds: StepSeeds, step: int) -> tuple[AnySeeds, torch.Tensor]:
        """The nodes at the ends of a step's edges and negatives, and the pairs among them."""
        epoch, negatives = self.epoch, self._negatives
        src, dst = self._edges.at(seeds.own)
        count = len(seeds.of_all_ranks)
        drawn = _uniform(self._graph.num_dst, count * negatives, epoch.seed, epoch.number, step)
        wrong = drawn.reshape(count, negatives)[seeds.part].ravel()
        src, dst = np.concatenate([src, src.repeat(negatives)]), np.concatenate([dst, wrong])
        times = self._edges.times_at(seeds.own)
        if times is None:
            nodes, pairs = _ends(self._graph.relation, src, dst)
            return next(iter(nodes.values())) if epoch.topology.homogeneous else nodes, pairs
        times = np.concatenate([times, times.repeat(negatives)])
        both, pairs = _ends(self._graph.relation, np.stack([src, times]), np.stack([dst, times]))
        ids, latest = ({t: ends[i] for t, ends in both.items()} for i in (0, 1))
        if epoch.topology.homogeneous:
            [(only, of_only)] = zip(ids.values(), latest.values(), strict=True)
            return TimedSeeds(only, of_only), pairs
        return TimedSeeds(ids, latest), pairs

    def _finish(self, pairs: torch.Tensor, seeds: StepSeeds, sampled: Minibatch) -> Minibatch:
        on, count = self.epoch.stream, len(seeds.own)
        labels = torch.zeros(pairs.shape[1])
        labels[:count] = 1
        minibatch = EdgeMinibatch(
            **{f.name: getattr(sampled, f.name) for f in fields(Minibatch)},
            pairs=on.to_device(pairs),
            positive_count=count,
        )
        minibatch.labels = on.to_device(labels)
        if self._excluded:
            ids = on.to_device(torch.from_numpy(np.stack(self._edges.at(seeds.of_all_ranks))))
            for relation, backwards in self._excluded:
                _without_edges(minibatch, relation, ids.flip(0) if backwards else ids)
        return minibatch


class _Edges:
    """The seed edges: a copy of the given ones, or all edges of a graph, in its order.

    times: of them, or None; of all edges by edge id. own: they have their own times. ids: the edge ids of all
    edges by position, if they are not the positions.
    """

    def __init__(
        self, graph: Graph, edges: torch.Tensor | None, times: torch.Tensor | None, *, own: bool
    ) -> None:
        self._graph = graph
        self._given: np.ndarray | None = None
        self._times = graph.edge_times if own else None
        self.ids = graph.edge_ids if edges is None else None
        self.count = graph.num_edges
        if edges is not None:
            self._take(graph, edges)
        if times is None:
            return
        if times.dtype != torch.int64 or times.shape != (self.count,):
            raise ValueError(
                f"time is {times.dtype}{list(times.shape)}: give int64[{self.count}], one for each edge"
            )
        by_id = on_host(times).numpy()
        self._times = by_id.copy() if self.ids is None else by_id[self.ids]

    def _take(self, graph: Graph, edges: torch.Tensor) -> None:
        tensor = isinstance(edges, torch.Tensor)
        if not tensor or edges.dtype != torch.int64 or edges.dim() != 2 or len(edges) != 2:
            kind = f"{edges.dtype}{list(edges.shape)}" if tensor else type(edges).__name__
            raise TypeError(f"edges is {kind}: give int64[2, n], sources and destinations")
        self._given = on_host(edges).clone().numpy()
        self.count = edges.shape[1]
        for ids, ntype, limit in zip(
            self._given, graph.relation[::2], (graph.num_src, graph.num_dst), strict=True
        ):
            check_range(ids, limit, f"edges have {ntype!r} nodes from")

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, destinations), int64 each."""
        if self._given is not None:
            return self._given[0][positions], self._given[1][positions]
        destinations = np.searchsorted(self._graph.indptr, positions, side="right") - 1
        return self._graph.indices[positions].astype(np.int64), destinations.astype(np.int64)

    def times_at(self, positions: np.ndarray) -> np.ndarray | None:
        return None if self._times is None else self._times[positions].astype(np.int64)

    def hash(self, update: Callable[[Any], None]) -> None:
        for ids in self._given if self._given is not None else ():
            update(np.ascontiguousarray(ids))
        if self._times is not None and self._times is not self._graph.edge_times:
            update(np.ascontiguousarray(self._times))


def _uniform(limit: int, count: int, seed: int, epoch: int, step: int) -> np.ndarray:
    """int64[count] in [0, limit). The counter is above all counters of an epoch's order."""
    key = np.array([seed, epoch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, 1]))
    return generator.integers(0, limit, count)


def _ends(
    relation: Relation, src: np.ndarray, dst: np.ndarray
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The ends, each once, by type; and int64[2, n], the positions of src and dst among them.

    src, dst: int64[n] nodes, or int64[2, n], nodes and times.
    """
    unique = partial(np.unique, return_inverse=True, axis=-1)
    if relation[0] == relation[2]:
        ends, places = unique(np.concatenate([src, dst], axis=-1))
        return {relation[0]: torch.from_numpy(ends)}, torch.from_numpy(places.reshape(2, -1))
    sources, at_source = unique(src)
    destinations, at_destination = unique(dst)
    pairs = torch.from_numpy(np.stack([at_source.reshape(-1), at_destination.reshape(-1)]))
    return {relation[0]: torch.from_numpy(sources), relation[2]: torch.from_numpy(destinations)}, pairs


def _without_edges(minibatch: Minibatch, relation: Relation, edges: torch.Tensor) -> None:
    """Remove the edges of a relation from edges[0, i] to edges[1, i] from all blocks, and the reverse edges
    that a bidirectional subgraph made from them. Input nodes stay.

    edges: int64[2, n], node ids, on the minibatch's device. Raises TypeError for a minibatch without blocks
    of the relation.
    """
    if not minibatch.blocks:
        raise _missing("blocks")
    nodes, layers = minibatch.input_nodes, []
    for layer in minibatch.blocks:
        blocks = layer if isinstance(layer, dict) else {layer.relation: layer}
        if relation not in blocks:
            raise _missing(f"blocks of {describe_type(relation)}")
        kept = {}
        for name, block in blocks.items():
            src, dst = (nodes[t] if isinstance(nodes, dict) else nodes for t in name[::2])
            kept[name] = _without(block, src, dst, relation, edges)
        layers.append(kept if isinstance(layer, dict) else kept[relation])
    minibatch.blocks = cast(Any, layers)


def _missing(what: str) -> TypeError:
    return TypeError(f"exclude= needs a sampler that makes {what}, and this one does not: use exclude=None")


def _without(
    block: Block, src: torch.Tensor, dst: torch.Tensor, relation: Relation, edges: torch.Tensor
) -> Block:
    """src, dst: the minibatch's nodes of the types of the block."""
    of_relation = block.relation == relation
    made_from_it = block.reverse is not None and block.reverse.relation == relation
    if not (of_relation or made_from_it):
        return block
    from_local, to_local = block.coo()
    sources, destinations, keys = src[from_local], dst[to_local], _keys(*edges)
    left_out = torch.zeros_like(from_local, dtype=torch.bool)
    if of_relation:
        left_out |= torch.isin(_keys(sources, destinations), keys)
    if made_from_it:
        left_out |= (block.positions < 0) & torch.isin(_keys(destinations, sources), keys)
    keep = ~left_out
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    values: dict[str, Any] = {f.name: getattr(block, f.name) for f in fields(block)}
    of_edges = {n: v[keep] for n, v in values.items() if isinstance(v, torch.Tensor) and n != "indptr"}
    return Block(**{**values, **of_edges, "indptr": before[block.indptr]})


def _keys(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """One number for each pair of ids, which are below 2^32."""
    return dst << 32 | src
