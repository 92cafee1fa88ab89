"""PyG's FeatureStore and GraphStore interfaces over a dataset, for PyG's own loaders. Users make them.

They read memory-mapped rows, without cache and lookahead. NeighborLoader is faster.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import torch
from torch_geometric.data import FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from gids import store as gids_store
from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import graphs_of
from gids.store.files import private_tensor
from gids.store.names import Relation
from gids.store.part import refuse_part

LABEL = "y"
_USUAL = {"node": "x", "edge": "edge_attr"}
"""PyG's name for input features; `gids convert` calls them "feat"."""

Type = str | Relation | None


class _OverStore:
    """The dataset behind a store of PyG, whose own attributes are tensors. Pickled as the dataset."""

    store: gids_store.FeatureStore

    def __init__(self, store: gids_store.FeatureStore | str | os.PathLike[str]) -> None:
        super().__init__()
        opened = store if isinstance(store, gids_store.FeatureStore) else gids_store.FeatureStore(store)
        refuse_part(opened, f"gids.pyg.{type(self).__name__}")
        self.__dict__["store"] = opened

    @property
    def typed(self) -> bool:
        """Whether node types and edge types have names, as in HeteroData."""
        return not is_homogeneous(self.store)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    def _refuse(self, *_: object) -> NoReturn:
        name = self.store.name
        raise TypeError(f"{name} cannot be changed: a gids dataset is written once, by `gids convert`")


class MappedFeatures(_OverStore, FeatureStore):  # type: ignore[misc]  # PyG is not typed
    """The tables and labels of a dataset as PyG's FeatureStore. Read-only.

    store: a gids.FeatureStore, or a path. Groups are node types and edge types; None in a dataset with one of
    each, as in PyG's homogeneous graphs. The table "feat" is the attribute "x" of nodes or "edge_attr" of
    edges, and labels are "y".

    An index is a tensor of integers or bool, a slice, an int, which reads one row without the dimension of
    rows, or None, which reads all rows into memory. Negative integers count from the end. Tensors are on the
    CPU, of the table's dtype. Works in workers. Raises KeyError for an attribute that the dataset does not
    have, IndexError for a row out of range.
    """

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Without types only attributes of nodes, because PyG reads all of them by node."""
        tables = [t for t in self.store.tables.values() if t.kind == "node" or self.typed]
        attrs = [(t.type, attribute_of(self.store, t)) for t in tables]
        attrs += [(ntype, LABEL) for ntype in self.store.labels if (ntype, LABEL) not in attrs]
        return [TensorAttr(type_ if self.typed else None, name) for type_, name in attrs]

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        stored = self._find(attr)
        ids = _ids_of(attr.index, self._get_tensor_size(attr)[0])
        rows = stored[ids] if isinstance(stored, torch.Tensor) else stored.read_rows(ids)
        return rows[0] if _is_row(attr.index) else rows

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        stored = self._find(attr)
        if isinstance(stored, torch.Tensor):
            return tuple(stored.shape)
        return (stored.row_count, *stored.shape)

    def _find(self, attr: TensorAttr) -> gids_store.Table | torch.Tensor:
        name = attr.attr_name
        for type_ in self._types(attr.group_name):
            table = table_of(self.store, type_, name)
            if table is not None:
                return table
            if isinstance(type_, str) and name == LABEL and type_ in self.store.labels:
                return self.store.labels[type_]
        known = ", ".join(f"{a.group_name!r} {a.attr_name!r}" for a in self.get_all_tensor_attrs())
        raise MissingError(f"{self.store.name} has no {name!r} of {attr.group_name!r} (it has {known})")

    def _types(self, group: Type) -> list[Any]:
        if group is not None:
            return [group]
        return [] if self.typed else [*self.store.node_types, *self.store.relations]

    _put_tensor = _remove_tensor = _OverStore._refuse

    def __len__(self) -> int:
        return len(self.get_all_tensor_attrs())


class MappedGraph(_OverStore, GraphStore):  # type: ignore[misc]  # PyG is not typed
    """The topology of a dataset as PyG's GraphStore. Read-only. int64 arrays are mapped from the files.

    store: a gids.FeatureStore, or a path. Edge types are the relations; None in a dataset with one node type
    and one relation, as in PyG's homogeneous graphs. The layout is CSC; csr() and coo() make the others in
    memory. Permutations are edge ids, which number the rows of edge features.
    """

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        return [
            EdgeAttr(g.relation if self.typed else None, EdgeLayout.CSC, True, (g.num_src, g.num_dst))
            for g in graphs_of(self.store)
        ]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        if edge_attr.layout != EdgeLayout.CSC:
            return None
        graph = self._graph(edge_attr)
        return private_tensor(graph.indices), private_tensor(graph.indptr)

    def _edge_to_layout(
        self, attr: EdgeAttr, layout: EdgeLayout, store: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        row, col, order = super()._edge_to_layout(attr, layout, store)
        edge_ids = self._graph(attr).edge_ids
        if edge_ids is None:
            return row, col, order
        ids = private_tensor(edge_ids)
        return row, col, ids if order is None else ids[order]

    def _graph(self, attr: EdgeAttr) -> gids_store.Graph:
        relation = attr.edge_type
        if relation is None and self.typed:
            raise MissingError(f"{self.store.name} has several types of nodes or edges: give an edge type")
        return self.store.graph(None if relation is None else tuple(relation))

    _put_edge_index = _remove_edge_index = _OverStore._refuse


def attribute_of(store: gids_store.FeatureStore, table: gids_store.Table) -> str:
    """The table's key, except that "feat" becomes "x" (of edges: "edge_attr"), unless its type also has a
    table with this key.
    """
    usual = _USUAL[table.kind]
    taken = store.find_table(table.kind, table.type, usual) is not None
    return usual if table.key == "feat" and not taken else table.key


def table_of(
    store: gids_store.FeatureStore, type_: str | Relation, attribute: str
) -> gids_store.Table | None:
    """The table that has this name in PyG."""
    for table in store.tables.values():
        if table.type == type_ and attribute_of(store, table) == attribute:
            return table
    return None


def is_homogeneous(store: gids_store.FeatureStore) -> bool:
    """Whether there is one node type and one relation at most: PyG's Data, else HeteroData."""
    return len(store.node_types) == 1 and len(store.relations) <= 1


def _ids_of(index: Any, count: int) -> torch.Tensor:
    """int64[n]. Negative ids count from the end; None: all rows."""
    index = slice(None) if index is None else index
    if isinstance(index, slice):
        return torch.from_numpy(np.arange(*index.indices(count), dtype=np.int64))
    ids = on_host(torch.as_tensor([index] if _is_row(index) else index))
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise IndexError(
                f"the mask has shape {list(ids.shape)}; it must be [{count}], the number of rows"
            )
        return ids.nonzero().view(-1)
    ids = ids.to(torch.int64).view(-1)
    if len(ids) and not (ids.min() >= -count and ids.max() < count):
        raise IndexError(f"rows {ids.min()} to {ids.max()} are out of range: there are {count} rows")
    return torch.where(ids < 0, ids + count, ids)


def _is_row(index: Any) -> bool:
    """Whether an index names one row, whose tensor has no dimension for rows."""
    if isinstance(index, torch.Tensor | np.ndarray):
        return index.ndim == 0
    return isinstance(index, int | np.integer) and not isinstance(index, bool)
