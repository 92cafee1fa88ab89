"""A layer: its nodes and their blocks, the tables that it reads, its call, the destination of its output.

A block's cost is an upper bound of the rows that it reads: its nodes and their in-edges. Blocks are cut by
cost, in the order of ids, as neighboring ids share rows. Called by layerwise.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from gids.cache.output_dtype import converted, out_dtype_of, out_row_bytes
from gids.errors import MemoryBudgetError
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.store import Table
from gids.store.names import Relation
from gids.write.table_writer import TableWriter

Layer = Callable[..., Any]
"""layer(block, h_src) -> h_dst, or layer(block, h_src, edge_rows) with edge tables.

In a dataset with several types, block and edge_rows are dictionaries by relation, h_src and h_dst by type.
"""
Model = Sequence[Layer] | torch.nn.ModuleList | Callable[..., Any]
Type = TypeVar("Type")
Nodes = torch.Tensor | None
"""Ids in ascending order, int64[n]; or None: all nodes of the type."""

_SAMPLED_ROWS = 1 << 17
"""Target rows of blocks that are sampled only for their nodes."""
log = logging.getLogger("gids")


class Layers:
    """A model as numbered layers."""

    def __init__(self, model: Model, layer_count: int | None) -> None:
        self._all: list[Layer] = []
        if isinstance(model, Sequence | torch.nn.ModuleList):
            self._all = list(model)
            self.count = len(self._all)
            if layer_count not in (None, self.count):
                raise ValueError(
                    f"layer_count={layer_count}, but the model has {self.count} layers: leave it out"
                )
        elif callable(model):
            if layer_count is None:
                raise ValueError("the model is a function, layer(i, block, h_src): give layer_count as well")
            self.count = layer_count
        else:
            raise TypeError(f"model must be a list of layers or a function (got {type(model).__name__})")
        if self.count < 1 or not all(map(callable, self._all)):
            raise ValueError(
                f"model must have one or more layers, each a function of (block, h_src) (got {self.count})"
            )
        self._model: Any = model
        if any(getattr(part, "training", False) for part in (model, *self._all)):
            log.warning("the model is in training mode, where dropout is active: call model.eval() first")

    def __call__(self, index: int, *arguments: Any) -> Any:
        with torch.no_grad():
            return self._all[index](*arguments) if self._all else self._model(index, *arguments)


def output_of(returned: Any, index: int, ntype: str, count: int, *, by_type: bool) -> torch.Tensor | None:
    """A layer's output for `count` nodes of a type, or None if it has none for that type.

    Raises TypeError and ValueError for a wrong output.
    """
    if by_type and not isinstance(returned, dict):
        raise TypeError(
            f"layer {index} returned {type(returned).__name__}; with several types it must return a "
            "dictionary, node type -> tensor"
        )
    rows = returned.get(ntype) if by_type else returned
    if rows is None and by_type:
        return None
    if not isinstance(rows, torch.Tensor):
        raise TypeError(
            f"layer {index} returned {type(rows).__name__} for {ntype!r} nodes; it must return a tensor"
        )
    if not rows.dim() or len(rows) != count:
        raise ValueError(
            f"layer {index} returned {list(rows.shape)} for {count} {ntype!r} nodes; it must return one row "
            "per destination, block.num_dst rows (their inputs are h_src[:block.num_dst])"
        )
    return rows


def block_on(minibatch: Minibatch, device: torch.device) -> Block | dict[Relation, Block]:
    """The only layer of a minibatch, on a device."""
    layer = minibatch.blocks[0]
    if isinstance(layer, dict):
        return {relation: _moved(block, device) for relation, block in layer.items()}
    return _moved(layer, device)


def _moved(block: Block, device: torch.device) -> Block:
    arrays = {name: getattr(block, name).to(device) for name in ("indptr", "indices", "positions")}
    return dataclasses.replace(block, **arrays)


def per_type(values: dict[Type, torch.Tensor], homogeneous: bool) -> torch.Tensor | dict[Type, torch.Tensor]:
    """values, or its only tensor if homogeneous."""
    return next(iter(values.values())) if homogeneous else values


class TableSink:
    """A table of `count` nodes of a type. It is begun when the first rows show their shape.

    begin(shape, dtype): makes the table. dtype: of floating-point rows; other rows keep theirs. write() takes
    the rows in their order.
    """

    def __init__(
        self, begin: Callable[[tuple[int, ...], torch.dtype], TableWriter], count: int, dtype: torch.dtype
    ) -> None:
        self._begin, self._count, self._dtype = begin, count, dtype
        self._writer: TableWriter | None = None
        self.layer_dtype = dtype
        """The dtype of the layer's rows."""

    @property
    def name(self) -> str:
        """The name of the table."""
        assert self._writer is not None, "write() was never called"
        return self._writer.name

    def write(self, _start: int, rows: torch.Tensor) -> None:
        if self._writer is None:
            self.layer_dtype = rows.dtype
            dtype = self._dtype if rows.dtype.is_floating_point else rows.dtype
            self._writer = self._begin((self._count, *rows.shape[1:]), dtype)
        self._writer.write(rows)


class TensorSink:
    """A tensor of `count` rows on the CPU, in the layer's dtype."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None, "write() was never called"
        return self._values

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._values is None:
            self._values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self._values[start : start + len(rows)] = rows


@dataclass(frozen=True)
class Span:
    """Successive targets of one type: the positions start to stop - 1 among them."""

    ntype: str
    start: int
    stop: int
    cost: int


class Targets:
    """The nodes of every type that one layer is computed for."""

    def __init__(self, topology: Topology, nodes: Mapping[str, Nodes]) -> None:
        self._topology = topology
        self._counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        self.nodes = dict(nodes)

    @property
    def count(self) -> int:
        return sum(map(self.count_of, self.nodes))

    def count_of(self, ntype: str) -> int:
        ids = self.nodes[ntype]
        return self._counts[ntype] if ids is None else len(ids)

    def ids(self, span: Span) -> torch.Tensor:
        """int64[stop - start]: the nodes of a span."""
        ids = self.nodes[span.ntype]
        return torch.arange(span.start, span.stop) if ids is None else ids[span.start : span.stop]

    def positions(self, ntype: str, ids: torch.Tensor) -> torch.Tensor:
        """The positions of nodes among the targets of their type."""
        targets = self.nodes[ntype]
        return ids if targets is None else torch.searchsorted(targets, ids)

    def spans(self, most: int, limit: int, *, edge_rows: bool = False) -> list[Span]:
        """All targets, cut into spans that cost at most `most`, or hold one node of at most `limit`.

        edge_rows: rows of edges are read too, so a span costs at least its number of in-edges. Raises
        MemoryBudgetError for a node that costs more than `limit`.
        """
        spans = []
        for ntype in self.nodes:
            cost, count, start = self._costs(ntype), self.count_of(ntype), 0
            while True:  # without nodes, one empty span gives the shapes
                end = bisect_right(range(count + 1), cost(start) + most, start + 1, count + 1, key=cost) - 1
                stop = min(count, max(start + 1, end))
                rows = cost(stop) - cost(start)
                span = Span(ntype, start, stop, rows if edge_rows else self._distinct(ntype, rows))
                if span.cost > limit:
                    raise MemoryBudgetError(
                        f"{ntype!r} node {int(self.ids(span)[0])} and its in-neighbors are up to "
                        f"{span.cost} rows, but a block has room for {limit}: give gids.open() more memory"
                    )
                spans.append(span)
                if stop == count:
                    break
                start = stop
        return spans

    def _distinct(self, ntype: str, cost: int) -> int:
        """The cost, limited to the number of nodes."""
        sources = {ntype} | {r[0] for r in self._topology.relations if r[2] == ntype}
        return min(cost, sum(self._counts[t] for t in sources))

    def _costs(self, ntype: str) -> Callable[[int], int]:
        """The cost of the first n targets of a type, as a function of n."""
        indptrs = [g.indptr for g in self._topology.graphs if g.relation[2] == ntype]
        ids = self.nodes[ntype]
        if ids is None:
            return lambda n: n + sum(int(indptr[n]) for indptr in indptrs)
        wanted = ids.numpy()
        costs = np.ones(len(wanted) + 1, np.int64)
        costs[0] = 0
        for indptr in indptrs:
            costs[1:] += indptr[wanted + 1] - indptr[wanted]
        costs.cumsum(out=costs)
        return lambda n: int(costs[n])


class Neighborhoods:
    """Samples the full in-neighborhoods of nodes of one type."""

    def __init__(self, topology: Topology, threads: int | None) -> None:
        self.topology = topology
        self._sampler = Neighbor([-1], threads=threads)

    def minibatch(self, targets: Targets, span: Span) -> Minibatch:
        ids = targets.ids(span)
        seeds = ids if self.topology.homogeneous else {span.ntype: ids}
        return self._sampler.sample(self.topology, seeds, seed=0)  # of all edges: nothing is drawn

    def needed_by(self, targets: Targets) -> Targets:
        """The targets of the layer before: these targets and their in-neighbors.

        If all nodes of a type are targets, all nodes of its neighbors' types count as needed. A type of which
        no node is needed is there without nodes, as blocks have its relations. Takes one byte of memory per
        node of the types that are not whole.
        """
        topology = self.topology
        counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        whole_types: set[str] = set()
        read_types: set[str] = set()
        for ntype, ids in targets.nodes.items():
            of_type = {ntype, *(r[0] for r in topology.relations if r[2] == ntype)}
            read_types |= of_type
            if ids is None:
                whole_types |= of_type
        flags = {t: torch.zeros(counts[t], dtype=torch.bool) for t in read_types - whole_types}
        some = Targets(topology, {t: ids for t, ids in targets.nodes.items() if ids is not None})
        for span in some.spans(_SAMPLED_ROWS, sum(counts.values()) + 1):
            for ntype, ids in self.input_nodes(self.minibatch(some, span)):
                if ntype in flags:
                    flags[ntype][ids] = True
        needed: dict[str, Nodes] = {}
        for ntype in topology.node_types:
            flagged = flags.pop(ntype, torch.zeros(0)).nonzero().flatten()
            needed[ntype] = None if ntype in whole_types else flagged
        return Targets(topology, needed)

    def input_nodes(self, minibatch: Minibatch) -> list[tuple[str, torch.Tensor]]:
        """(type, ids) of the nodes that a block reads."""
        nodes = minibatch.input_nodes
        return list(nodes.items()) if isinstance(nodes, dict) else [(self.topology.node_types[0], nodes)]


class EdgeFeatures:
    """At most one table per relation. Every layer gets the same rows.

    tables: by the names that the FeatureLoader uses for them; tables of nodes are named by their types.
    dtype: of floating-point rows (None: the stored one).
    """

    def __init__(
        self, tables: Mapping[Relation, Table], dtype: torch.dtype | None, topology: Topology
    ) -> None:
        self._homogeneous = topology.homogeneous
        self._names: dict[Relation, str] = {}
        for relation in tables:
            name = ".".join(relation)
            while name in topology.node_types or name in self._names.values():
                name += "'"
            self._names[relation] = name
        self._dtype = dtype
        self.tables = {name: tables[relation] for relation, name in self._names.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest row, stored or converted; 0 without tables."""
        tables = self.tables.values()
        sizes = ((t.row_bytes, out_row_bytes(t, None), out_row_bytes(t, self._dtype)) for t in tables)
        return max(map(max, sizes), default=0)

    def ids_of(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        """int64[num_edges] by table name: the rows that a minibatch of one layer reads."""
        [layer] = minibatch.blocks
        blocks = layer if isinstance(layer, dict) else {layer.relation: layer}
        return {name: blocks[relation].edge_ids for relation, name in self._names.items()}

    def for_layer(
        self, rows: Mapping[str, torch.Tensor]
    ) -> tuple[()] | tuple[torch.Tensor | dict[Relation, torch.Tensor]]:
        """The arguments of a layer after block and h_src; empty without tables."""
        if not self.tables:
            return ()
        by_relation = {
            r: converted(rows[name], self.tables[name], out_dtype_of(self.tables[name], self._dtype))
            for r, name in self._names.items()
        }
        return (per_type(by_relation, self._homogeneous),)


class Inputs:
    """The tables that a layer reads: at most one per node type, and tables of edges.

    nodes: tables by type. dtypes: of the rows that the layer gets, by type. targets: the nodes whose rows the
    tables hold (None: all nodes; then layers get ids of types without a table). Attributes: edges; tables:
    all tables by the names that the loader uses.
    """

    def __init__(
        self,
        nodes: Mapping[str, Table],
        dtypes: Mapping[str, torch.dtype],
        edges: EdgeFeatures,
        targets: Targets | None = None,
    ) -> None:
        self.edges, self.tables = edges, {**nodes, **edges.tables}
        self._nodes, self._dtypes, self._targets = nodes, dtypes, targets

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest node row with its conversion, if it has one, and of a row of an edge to it."""
        largest = 8
        for ntype, table in self._nodes.items():
            dtype = self._dtypes[ntype]
            converted_bytes = math.prod(table.shape) * dtype.itemsize if dtype != table.dtype else 0
            largest = max(largest, max(table.row_bytes, out_row_bytes(table, None)) + converted_bytes)
        return largest + self.edges.row_bytes

    def rows_of(
        self, nodes: Iterable[tuple[str, torch.Tensor]], minibatch: Minibatch
    ) -> dict[str, torch.Tensor]:
        """By table, the rows of these nodes and of the minibatch's edges."""
        mine = ((t, ids) for t, ids in nodes if t in self._nodes)
        positions = {t: ids if self._targets is None else self._targets.positions(t, ids) for t, ids in mine}
        return {**positions, **self.edges.ids_of(minibatch)}

    def for_layer(
        self,
        nodes: Iterable[tuple[str, torch.Tensor]],
        rows: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """The rows of nodes, or their ids, for a layer, by type."""

        def of(ntype: str) -> torch.Tensor:
            return converted(rows[ntype], self._nodes[ntype], self._dtypes[ntype])

        if self._targets is not None:
            return {t: of(t) for t in self._nodes}
        return {t: of(t) if t in self._nodes else ids.to(device) for t, ids in nodes}
