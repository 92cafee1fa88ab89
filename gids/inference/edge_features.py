"""Edge features for layers. Made by layerwise, used by its Run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gids.cache.output_dtype import out_dtype_of, out_row_bytes
from gids.inference.layers import per_type
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

    def reads_alike(self, dtype: torch.dtype | None) -> bool:
        """Whether reading with this dtype gives the rows that layers need."""
        tables = self.tables.values()
        return all(out_dtype_of(t, dtype) == out_dtype_of(t, self._dtype) for t in tables)

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest row, stored or converted; 0 without tables."""
        of_tables = [
            (t.row_bytes, out_row_bytes(t, None), out_row_bytes(t, self._dtype)) for t in self.tables.values()
        ]
        return max(map(max, of_tables), default=0)

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
        found = {
            r: rows[name].to(out_dtype_of(self.tables[name], self._dtype)) for r, name in self._names.items()
        }
        return (per_type(found, self._homogeneous),)
