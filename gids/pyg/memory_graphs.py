"""The topology and attributes of PyG data in memory, and of other people's stores. Called by NeighborSampler.

data: Data, HeteroData, or (FeatureStore, GraphStore) of torch_geometric.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.data import FeatureStore as PygFeatureStore
from torch_geometric.data import GraphStore as PygGraphStore

from gids.cuda import on_host
from gids.pyg.sampling_attributes import STORED
from gids.store import Graph
from gids.store.names import NODE, RELATION, Relation, describe_type

Type = str | Relation


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


def attribute_in_memory(data: Any, type_: Type, name: str) -> Any:
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
