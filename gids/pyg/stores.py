"""PyG's FeatureStore and GraphStore interfaces over a dataset, for PyG's own loaders. Users make them.

They read memory-mapped rows, without cache and lookahead. NeighborLoader is faster. NeighborSampler takes
from here the topology and attributes that it samples: of datasets, and of data in memory, which is Data,
HeteroData, or (FeatureStore, GraphStore) of torch_geometric.
"""

from __future__ import annotations

import os
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.data import FeatureStore as PygFeatureStore
from torch_geometric.data import GraphStore as PygGraphStore
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from gids import store as gids_store
from gids.cuda import on_host
from gids.errors import MissingError
from gids.loader.row_source import RowSource
from gids.pyg.hops import STORED
from gids.store import Graph, graphs_of
from gids.store.files import private_tensor
from gids.store.names import NODE, RELATION, Relation, describe_type
from gids.store.part import refuse_part

LABEL = "y"
_USUAL = {"node": "x", "edge": "edge_attr"}
"""PyG's name for input features; `gids convert` calls them "feat"."""

Type = str | tuple[str, str, str] | None
NodeOrEdgeType = str | Relation


class _OverStore:
    """The dataset behind a store of PyG, whose own attributes are tensors. Pickled as the dataset."""

    store: gids_store.FeatureStore
    typed: bool

    def __init__(
        self, store: gids_store.FeatureStore | str | os.PathLike[str], *, typed: bool | None = None
    ) -> None:
        super().__init__()
        opened = store if isinstance(store, gids_store.FeatureStore) else gids_store.FeatureStore(store)
        refuse_part(opened, f"gids.pyg.{type(self).__name__}")
        is_untyped = is_homogeneous(opened)
        if typed is False and not is_untyped:
            raise ValueError(f"typed=False: {opened.name} has {_types(opened)}, which need their names")
        self.__dict__["store"] = opened
        self.__dict__["typed"] = not is_untyped if typed is None else bool(typed)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), typed=self.typed), (self.store,)

    def _refuse(self, *_: object) -> NoReturn:
        name = self.store.name
        raise TypeError(f"{name} cannot be changed: a gids dataset is written once, by `gids convert`")


class FeatureStore(_OverStore, PygFeatureStore):  # type: ignore[misc]  # PyG is not typed
    """The tables and labels of a dataset as PyG's FeatureStore. Read-only.

    store: a gids.FeatureStore, or a path. Groups are node types and edge types; None in a dataset with one of
    each, as in PyG's homogeneous graphs. typed=True: their names in such a dataset, too. The table "feat" is
    the attribute "x" of nodes or "edge_attr" of edges, and labels are "y".

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


class GraphStore(_OverStore, PygGraphStore):  # type: ignore[misc]  # PyG is not typed
    """The topology of a dataset as PyG's GraphStore. Read-only. int64 arrays are mapped from the files.

    store: a gids.FeatureStore, or a path. Edge types are the relations; None in a dataset with one node type
    and one relation, as in PyG's homogeneous graphs, unless typed=True. The layout is CSC; csr() and coo()
    make the others in memory. Permutations are edge ids, which number the rows of edge features.
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
            raise MissingError(f"{self.store.name} has {_types(self.store)}: give an edge type")
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


def is_on_disk(data: object) -> bool:
    """Whether a loader's argument `data` is a gids dataset. Raises ValueError for stores of two datasets."""
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], GraphStore):
        if not isinstance(data[0], FeatureStore):
            return False
        features, graph = data[0].store, data[1].store
        if not features.is_same_dataset(graph) or data[0].typed != data[1].typed:
            raise ValueError("the given FeatureStore and GraphStore are not of one gids dataset")
        return True
    return isinstance(data, str | os.PathLike | gids_store.FeatureStore | RowSource)


def store_of(data: Any) -> gids_store.FeatureStore:
    """The gids.FeatureStore of a loader's argument `data`, which is_on_disk."""
    if isinstance(data, tuple | list):
        return cast(gids_store.FeatureStore, data[0].store)
    if isinstance(data, RowSource):
        return data.store
    return data if isinstance(data, gids_store.FeatureStore) else gids_store.FeatureStore(data)


def graphs_on_disk(data: Any) -> list[Graph]:
    """The graphs of data, which is_on_disk. One node type without relations has a graph without edges, of 8
    bytes per node."""
    store = store_of(data)
    if store.relations or len(store.node_types) != 1:
        return data.graphs() if isinstance(data, RowSource) else graphs_of(store)
    [ntype], count = store.node_types, store.num_nodes()
    indptr, none = np.zeros(count + 1, np.int64), np.empty(0, np.int64)
    return [Graph((ntype, RELATION[1], ntype), count, count, indptr, none, None)]


def _types(store: gids_store.FeatureStore) -> str:
    return f"{len(store.node_types)} node types and {len(store.relations)} edge types"


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


def is_typed(data: Any) -> bool:
    """Whether seeds of data have a type. Raises TypeError for data of another kind."""
    if isinstance(data, Data | HeteroData):
        return isinstance(data, HeteroData)
    if (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], PygFeatureStore)
        and isinstance(data[1], PygGraphStore)
    ):
        return any(attr.edge_type is not None for attr in data[1].get_all_edge_attrs())
    raise TypeError(
        f"data is {type(data).__name__}: give gids.open(...), a path, a gids.FeatureStore, PyG's Data or "
        "HeteroData, or a pair of stores with PyG's interfaces, such as (gids.pyg.FeatureStore(...), "
        "gids.pyg.GraphStore(...))"
    )


def graphs_in_memory(data: Any, *, is_sorted: bool) -> list[Graph]:
    """A copy of the topology, sorted by destination: 16 bytes per edge. Edges to a node keep their order.

    Data without edge_index and adj_t has no edges. is_sorted: the edges are sorted by destination already,
    and are not copied. Raises ValueError if they are not, TypeError for edges in another form (adj),
    IndexError for an edge of a node out of range.
    """
    if isinstance(data, Data):
        return [_graph(data, RELATION, data.num_nodes, data.num_nodes, is_sorted)]
    if isinstance(data, HeteroData):
        counts = {ntype: data[ntype].num_nodes for ntype in data.node_types}
        return [
            _graph(storage, relation, counts[relation[0]], counts[relation[2]], is_sorted)
            for relation, storage in data.edge_items()
        ]
    return _of_stores(*data)


def attribute_in_memory(data: Any, type_: NodeOrEdgeType, name: str) -> Any:
    """The attribute of a type of nodes or edges, for all of them; None if the type has none of that name."""
    if isinstance(data, Data):
        if name not in data:
            return None
        is_nodes = data.is_node_attr(name)
        has = is_nodes if isinstance(type_, str) else data.is_edge_attr(name) or not is_nodes
        return data[name] if has else None
    if isinstance(data, HeteroData):
        return data[type_].get(name)
    features, typed = data[0], is_typed(data)
    if not typed and isinstance(type_, str) != (name == STORED):
        return None  # as in PyG, "time" is of nodes and any other name of edges, whatever the group
    groups = [a.group_name for a in features.get_all_tensor_attrs() if a.attr_name == name]
    if typed:
        groups = [group for group in groups if group == type_]
    if len(groups) > 1:
        raise ValueError(f"{len(groups)} groups {groups} have {name!r}, and the edges have no type: give one")
    return features.get_tensor(TensorAttr(groups[0], name, None)) if groups else None


def _graph(storage: Any, relation: Relation, num_src: int, num_dst: int, is_sorted: bool) -> Graph:
    if "adj_t" in storage:
        colptr, row, _ = storage.adj_t.csr()
        return _checked(relation, num_src, num_dst, colptr, row, None)
    if "edge_index" not in storage:
        if "adj" in storage:
            raise TypeError(f"{describe_type(relation)} has no edge_index: give its edges as edge_index")
        none = torch.empty(0, dtype=torch.int64)
        return _checked(relation, num_src, num_dst, torch.zeros(num_dst + 1, dtype=torch.int64), none, None)
    row, col = on_host(storage.edge_index)
    if len(col) and not (col.min() >= 0 and col.max() < num_dst):
        raise _out_of_range(relation, "leads to", col, num_dst)
    order = None
    if not is_sorted:
        order = col.argsort(stable=True)
        row = row[order]
    elif (col.diff() < 0).any():
        raise ValueError(
            f"is_sorted=True: edge_index of {describe_type(relation)} is not sorted by destination"
        )
    colptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(col, minlength=num_dst), 0, out=colptr[1:])
    return _checked(relation, num_src, num_dst, colptr, row, order)


def _of_stores(features: PygFeatureStore, graphs: PygGraphStore) -> list[Graph]:
    attrs = graphs.get_all_edge_attrs()
    rows, colptrs, orders = graphs.csc()
    if not isinstance(rows, dict):
        rows, colptrs, orders = {None: rows}, {None: colptrs}, {None: orders}
    sizes: list[tuple[str, int]] = []  # the largest one counts
    for attr in attrs:
        src, _, dst = _relation(attr.edge_type)
        sizes += zip((src, dst), attr.size or (), strict=False)
    for edge_type, colptr in colptrs.items():
        src, _, dst = _relation(edge_type)
        row = rows[edge_type]
        sizes += [(src, int(row.max()) + 1 if len(row) else 0), (dst, len(colptr) - 1)]
    sized = any(attr.size is not None and attr.edge_type is None for attr in attrs)
    for attr in features.get_all_tensor_attrs():  # without a group also of edges
        if isinstance(attr.group_name, str) or (attr.group_name is None and not sized):
            size = features.get_tensor_size(attr)
            sizes += [(attr.group_name or NODE, size[0])] if size else []
    counts = dict(sorted(sizes, key=itemgetter(1)))
    made = []
    for edge_type, colptr in colptrs.items():
        relation = _relation(edge_type)
        num_src, num_dst = counts[relation[0]], counts[relation[2]]
        padded = torch.nn.functional.pad(on_host(colptr).to(torch.int64), (0, num_dst + 1 - len(colptr)))
        padded[len(colptr) :] = colptr[-1]
        made.append(_checked(relation, num_src, num_dst, padded, rows[edge_type], orders[edge_type]))
    return made


def _relation(edge_type: Any) -> Relation:
    return RELATION if edge_type is None else (edge_type[0], edge_type[1], edge_type[2])


def _checked(
    relation: Relation,
    num_src: int,
    num_dst: int,
    colptr: torch.Tensor,
    row: torch.Tensor,
    order: torch.Tensor | None,
) -> Graph:
    if len(row) and not (row.min() >= 0 and row.max() < num_src):
        raise _out_of_range(relation, "comes from", row, num_src)
    edge_ids = None if order is None else on_host(order).numpy()
    return Graph(
        relation, num_src, num_dst, on_host(colptr).numpy(), on_host(row).contiguous().numpy(), edge_ids
    )


def _out_of_range(relation: Relation, what: str, ids: torch.Tensor, limit: int) -> IndexError:
    return IndexError(
        f"edge_index of {describe_type(relation)} {what} nodes {int(ids.min())} to {int(ids.max())}; "
        f"ids run from 0 to {limit - 1}"
    )
