"""The tables that a layer reads: rows of nodes, and of edges. Made by layerwise, used by its Run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from gids.cache.output_dtype import out_dtype_of, out_row_bytes
from gids.inference.layers import per_type
from gids.inference.sinks import TableSink
from gids.inference.targets import Targets
from gids.sampler import Minibatch, Topology
from gids.store import Table
from gids.store.names import Relation


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
            r: rows[name].to(out_dtype_of(self.tables[name], self._dtype)) for r, name in self._names.items()
        }
        return (per_type(by_relation, self._homogeneous),)


class Inputs:
    """The tables that a layer reads: at most one per node type, and tables of edges.

    nodes: tables by type. dtypes: of the rows that the layer gets, by type. targets: the nodes whose rows the
    tables hold (None: all nodes; then layers get ids of types without a table). sinks: that wrote the tables.
    Attributes: edges; tables: all tables by the names that the loader uses.
    """

    def __init__(
        self,
        nodes: Mapping[str, Table],
        dtypes: Mapping[str, torch.dtype],
        edges: EdgeFeatures,
        targets: Targets | None = None,
        sinks: Iterable[TableSink] = (),
    ) -> None:
        self.edges, self.tables = edges, {**nodes, **edges.tables}
        self._nodes, self._dtypes, self._targets, self._sinks = nodes, dtypes, targets, list(sinks)

    @classmethod
    def written(cls, sinks: Mapping[str, TableSink], targets: Targets, edges: EdgeFeatures) -> Inputs:
        """The inputs that a layer wrote for these targets."""
        tables = {ntype: sink.finish() for ntype, sink in sinks.items()}
        dtypes = {ntype: sink.layer_dtype for ntype, sink in sinks.items()}
        return cls(tables, dtypes, edges, targets, sinks.values())

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
        if self._targets is not None:
            return {t: rows[t].to(self._dtypes[t]) for t in self._nodes}
        return {t: rows[t].to(self._dtypes[t]) if t in self._nodes else ids.to(device) for t, ids in nodes}

    def discard(self) -> None:
        """Remove the tables that a layer wrote."""
        for sink in self._sinks:
            sink.discard()
