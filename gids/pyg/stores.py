"""PyG's FeatureStore and GraphStore interfaces over a dataset, for PyG's own loaders. Users make them.

They read memory-mapped rows, without cache and lookahead. NeighborLoader is faster.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch_geometric.data import FeatureStore as PygFeatureStore
from torch_geometric.data import GraphStore as PygGraphStore
from torch_geometric.data import TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from gids import store as gids_store
from gids.errors import MissingError
from gids.loader.source import Source
from gids.pyg.attributes import LABEL, attribute_of, is_homogeneous, table_of
from gids.store import graphs_of
from gids.store.private_map import private_tensor

Type = str | tuple[str, str, str] | None


class _OverStore:
    """The dataset behind a store of PyG, whose own attributes are tensors. Pickled as the dataset."""

    store: gids_store.FeatureStore

    def __init__(self, store: gids_store.FeatureStore | str | os.PathLike[str]) -> None:
        super().__init__()
        self.__dict__["store"] = (
            store if isinstance(store, gids_store.FeatureStore) else gids_store.FeatureStore(store)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)


class FeatureStore(_OverStore, PygFeatureStore):  # type: ignore[misc]  # PyG is not typed
    """The tables and labels of a dataset as PyG's FeatureStore. Read-only.

    store: a gids.FeatureStore, or a path. Groups are node types and edge types; None in a dataset with one of
    each, as in PyG's homogeneous graphs. The table "feat" is the attribute "x" of nodes or "edge_attr" of
    edges, and labels are "y".

    An index is a tensor of int64 or bool, a slice, an int, or None, which reads all rows into memory. Tensors
    are on the CPU, of the table's dtype. Works in workers. Raises KeyError for an attribute that the dataset
    does not have, IndexError for a row out of range.
    """

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """In a homogeneous dataset only attributes of nodes, because PyG reads all of them by node."""
        one = is_homogeneous(self.store)
        tables = [t for t in self.store.tables.values() if t.kind == "node" or not one]
        attrs = [(t.type, attribute_of(self.store, t)) for t in tables]
        attrs += [(ntype, LABEL) for ntype in self.store.labels if (ntype, LABEL) not in attrs]
        return [TensorAttr(None if one else type_, name) for type_, name in attrs]

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        found = self._find(attr)
        if isinstance(found, torch.Tensor):
            rows = _ids_of(attr.index, len(found))
            return found if rows is None else found[rows]
        rows = _ids_of(attr.index, found.row_count)
        return found.read_rows(torch.arange(found.row_count) if rows is None else rows)

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        found = self._find(attr)
        if isinstance(found, torch.Tensor):
            return tuple(found.shape)
        return (found.row_count, *found.shape)

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
        return [*self.store.node_types, *self.store.relations] if is_homogeneous(self.store) else []

    def _put_tensor(self, tensor: object, attr: TensorAttr) -> NoReturn:
        raise _read_only(self.store)

    def _remove_tensor(self, attr: TensorAttr) -> NoReturn:
        raise _read_only(self.store)

    def __len__(self) -> int:
        return len(self.get_all_tensor_attrs())


class GraphStore(_OverStore, PygGraphStore):  # type: ignore[misc]  # PyG is not typed
    """The topology of a dataset as PyG's GraphStore. Read-only. int64 arrays are mapped from the files.

    store: a gids.FeatureStore, or a path. Edge types are the relations; None in a dataset with one node type
    and one relation, as in PyG's homogeneous graphs. The layout is CSC; csr() and coo() make the others in
    memory. Permutations are edge ids, which number the rows of edge features.
    """

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        one = is_homogeneous(self.store)
        return [
            EdgeAttr(None if one else g.relation, EdgeLayout.CSC, True, (g.num_src, g.num_dst))
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
        if relation is None and not is_homogeneous(self.store):
            raise MissingError(f"{self.store.name} has {len(self.store.relations)} edge types: give one")
        return self.store.graph(None if relation is None else tuple(relation))

    def _put_edge_index(self, edge_index: object, edge_attr: EdgeAttr) -> NoReturn:
        raise _read_only(self.store)

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> NoReturn:
        raise _read_only(self.store)


def store_of(data: object) -> gids_store.FeatureStore:
    """The gids.FeatureStore of a loader's argument `data`. Raises TypeError."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], GraphStore):
        if isinstance(data[0], FeatureStore) and data[0].store.path == data[1].store.path:
            return data[0].store
        raise ValueError("the given FeatureStore and GraphStore are not of one gids dataset")
    if isinstance(data, str | os.PathLike):
        return gids_store.FeatureStore(data)
    if isinstance(data, gids_store.FeatureStore):
        return data
    if isinstance(data, Source):
        return data.store
    raise TypeError(
        f"data is {type(data).__name__}: give gids.open(...), a path, a gids.FeatureStore, or "
        "(gids.pyg.FeatureStore, gids.pyg.GraphStore). For Data in memory there is "
        "torch_geometric.loader.NodeLoader(data, node_sampler=gids.pyg.NeighborSampler(data, num_neighbors))"
    )


def _ids_of(index: Any, count: int) -> torch.Tensor | None:
    """int64[n], or None for all rows."""
    if index is None:
        return None
    if isinstance(index, slice):
        return torch.arange(*index.indices(count))
    if isinstance(index, int):
        index = [index]
    ids = torch.as_tensor(index).cpu()
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise IndexError(
                f"the mask has shape {list(ids.shape)}; it must be [{count}], the number of rows"
            )
        return ids.nonzero().view(-1)
    ids = ids.to(torch.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < count):
        raise IndexError(f"rows {ids.min()} to {ids.max()} are out of range: there are {count} rows")
    return ids


def _read_only(store: gids_store.FeatureStore) -> TypeError:
    return TypeError(f"{store.name} cannot be changed: a gids dataset is written once, by `gids convert`")
