"""Reads saved graphs of PyTorch Geometric: Data, HeteroData, their to_dict(), and InMemoryDataset's files.

Does not need torch_geometric: torch_file loads its objects as records of their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gids.convert.array_files import array_of
from gids.convert.edges import add_weights, count_by_edges, edge_rows, is_edge_array, largest_id
from gids.convert.labels import find_times
from gids.convert.readers.arrays import single
from gids.convert.source import Choices, InEdges, Reader, Source, whole_number
from gids.convert.source_files import shown
from gids.convert.torch_file import as_tensor, is_torch_file, load_torch
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name, describe_type
from gids.store.rows import TensorRows
from gids.write.edges import edge_list

# PyG recognises these by name, and all others by size.
_OF_NODES = ("x", "feat", "pos", "batch", "node_type", "n_id")
_OF_EDGES = ("edge_index", "edge_weight", "edge_attr", "edge_type", "e_id", "adj", "adj_t")
_SAVE = "save data.to_dict() with torch.save"


def _recognises(path: Path) -> bool:
    """By content, or by name for a truncated file."""
    return is_torch_file(path) or (path.is_file() and path.suffix in (".pt", ".pth"))


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    saved = load_torch(path)
    if isinstance(saved, torch.Tensor):
        if is_edge_array(TensorRows(saved)):
            raise FormatError(
                f"{path} may be edges or a table: put it into a directory, as edge_index.pt or as x.pt"
            )
        return single(array_of(saved), path, choices.table)
    graph = _Graph(path, Source(skip=choices.skip))
    by_key = {key: graph.attributes(store) for key, store in _stores(saved, path).items()}
    stores = _by_size(by_key[None]) if None in by_key else by_key
    for key, store in stores.items():
        if isinstance(key, str):
            graph.add_nodes(key, store)
    graph.count_ends(stores)
    for key, store in stores.items():
        if not isinstance(key, str):
            graph.add_edges(key, store)
    find_times(graph.source, ("time",))
    return graph.source


def _stores(saved: Any, path: Path) -> dict[Any, Any]:
    """The stores of the saved object by node type and relation. A Data has one, with the key None."""
    if isinstance(saved, (tuple, list)) and len(saved) > 1 and all("_store" in _fields(s) for s in saved):
        raise FormatError(f"{path} holds {len(saved)} graphs; save one graph per file with torch.save")
    if isinstance(saved, tuple) and len(saved) in (2, 3):  # (data, slices, class), of InMemoryDataset
        if saved[1] is not None:
            raise FormatError(f"{path} holds several graphs in one object; {_SAVE} for one graph")
        saved = saved[0]
    fields = _fields(saved)
    if not fields:
        raise FormatError(f"{path} holds a {type(saved).__name__}, not a PyG graph; {_SAVE}")
    if "_node_store_dict" in fields:
        nodes, edges = (_mapping(fields.get(f"_{kind}_store_dict"), path) for kind in ("node", "edge"))
        stores: dict[Any, Any] = {**nodes, **edges}
    elif any(isinstance(key, tuple) for key in fields) or "_global_store" in fields:
        stores = {key: store for key, store in fields.items() if key != "_global_store"}
    else:
        return {None: fields.get("_store", fields)}
    for key in stores:
        for name in key if isinstance(key, tuple) and len(key) == 3 else (key,):
            check_name(name, f"a node type or relation of {path}")
    return stores


def _fields(saved: Any) -> Mapping[str, Any]:
    """The fields of a Record, of PyG's own class if PyG is imported, or of a dictionary."""
    fields = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    return fields if isinstance(fields, Mapping) else {}


def _mapping(store: Any, path: Path) -> Mapping[str, Any]:
    mapping = store if isinstance(store, Mapping) else _fields(store).get("_mapping")
    if not isinstance(mapping, Mapping):
        raise FormatError(f"{path} was saved by an unknown version of PyG; {_SAVE}")
    return mapping


def _tensors(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The attributes that are arrays."""
    return {k: v for k, v in fields.items() if isinstance(v, torch.Tensor) and v.dim()}


def _by_size(fields: Mapping[str, Any]) -> dict[str | Relation, Mapping[str, Any]]:
    """The attributes of a Data's nodes and of its edges, separated by size as PyG does.

    If there are as many nodes as edges, attributes with "edge" in their name are of edges.
    """
    tensors = _tensors(fields)
    links, edge_count = _links(tensors), _edge_count(tensors)
    rows = {k: len(v) for k, v in tensors.items()}
    unclear = {k for k in rows if rows[k] == edge_count or k.startswith("edge_")}
    node_count = _node_count(fields) if unclear - {*_OF_EDGES, *_OF_NODES, *links} else None

    def is_of_edges(key: str) -> bool:
        if key in _OF_EDGES or key in links or key in _OF_NODES or key not in unclear:
            return key in _OF_EDGES or key in links
        return rows[key] != node_count or (rows[key] == edge_count and "edge" in key)

    return {
        NODE: {k: v for k, v in fields.items() if not is_of_edges(k)},
        RELATION: {k: v for k, v in fields.items() if is_of_edges(k)},
    }


def _edge_count(tensors: Mapping[str, torch.Tensor]) -> int | None:
    if "edge_index" in tensors and tensors["edge_index"].dim() == 2:
        return tensors["edge_index"].shape[1]
    matrix = _matrix(tensors)
    return None if matrix is None or matrix.layout == torch.strided else _matrix_values(matrix).shape[0]


def _matrix(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """adj_t, if it is a graph: a sparse tensor, or any without another graph."""
    matrix = tensors.get("adj_t")
    is_graph = matrix is not None and ("edge_index" not in tensors or matrix.layout != torch.strided)
    return matrix if is_graph else None


def _matrix_values(matrix: torch.Tensor) -> torch.Tensor:
    """One value per edge."""
    return matrix._values() if matrix.layout == torch.sparse_coo else matrix.values()


def _node_count(fields: Mapping[str, Any]) -> int | None:
    """The number that PyG infers, from the edges if there is nothing else."""
    if "num_nodes" in fields:
        return int(fields["num_nodes"])
    tensors = _tensors(fields)
    named = [k for k in tensors if k in _OF_NODES] + [k for k in tensors if "node" in k]
    if named:
        return len(tensors[named[0]])
    if "adj_t" in tensors and tensors["adj_t"].dim() >= 2:
        return tensors["adj_t"].shape[1]
    if (edges := tensors.get("edge_index")) is None or edges.dim() != 2 or len(edges) != 2:
        return None
    return max(1 + largest_id(TensorRows(row)) for row in edges)


def _links(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of pairs to predict and their labels, such as RandomLinkSplit adds."""
    return {k for k in tensors if k != "edge_index" and (k.endswith("edge_index") or "edge_label" in k)}


class _Graph:
    """Makes a Source from the stores of a file."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self.source = path, source

    def attributes(self, store: Any) -> Mapping[str, Any]:
        """The attributes of a store but for those to skip. Raises FormatError for a name that is not text."""
        mapping = _mapping(store, self._path)
        if others := [key for key in mapping if not isinstance(key, str)]:
            raise FormatError(f"{self._path} has an attribute called {shown(others[0])}; names must be text")
        kept = {k: as_tensor(v) for k, v in mapping.items() if not self.source.skips(k) and v is not None}
        if "num_nodes" in kept:
            kept["num_nodes"] = whole_number(kept["num_nodes"], f"num_nodes of {self._path}")
        if "edge_index" in kept and getattr(kept["edge_index"], "layout", None) != torch.strided:
            why = "not a dense tensor; save one of shape (2, E), or a sparse adj_t"
            self.source.leave_out(f"'edge_index' of {self._path}", why, "edge_index")
            del kept["edge_index"]
        return kept

    def add_nodes(self, ntype: str, store: Mapping[str, Any]) -> None:
        if "num_nodes" in store:
            self.source.add_nodes(ntype, store["num_nodes"], f"num_nodes of {ntype!r}")
        for key, values in store.items():
            if key == "num_nodes":
                continue
            if (rows := array_of(values).take(key, repr(ntype), self.source)) is None:
                continue
            what = f"{key!r} of {ntype!r} in {self._path}"
            self.source.add_node_array(ntype, key, rows, what, key, may_be_ids=True)

    def count_ends(self, stores: Mapping[str | Relation, Mapping[str, Any]]) -> None:
        """Set the numbers of nodes that only the edges give, as PyG does."""
        relations = {key: _tensors(store) for key, store in stores.items() if not isinstance(key, str)}
        for relation, tensors in relations.items():
            if (matrix := _matrix(tensors)) is not None:
                self._count_matrix(relation, matrix)
        ends = (
            (ntype, TensorRows(row))
            for relation, tensors in relations.items()
            if "edge_index" in tensors and tensors["edge_index"].dim() == 2
            for ntype, row in zip(relation[::2], tensors["edge_index"], strict=False)
        )
        count_by_edges(self.source, ends)

    def add_edges(self, relation: Relation, store: Mapping[str, Any]) -> None:
        tensors = _tensors(store)
        links, matrix = _links(tensors), _matrix(tensors)
        is_listed = "edge_index" in tensors
        if (is_listed and matrix is not None) or ("adj" in tensors and not is_listed and matrix is None):
            raise FormatError(
                f"{describe_type(relation)} must have one graph, edge_index or adj_t; leave others out with "
                "--skip, and save adj.t() as adj_t"
            )
        for key, values in store.items():
            if key in links:
                why = f"a dataset has no pairs to predict; load them from {self._path}"
                self.source.leave_out(f"{key!r} of {relation!r}", why, key)
            elif matrix is not None and values is matrix:
                self._add_matrix(relation, matrix)
            elif (rows := array_of(values).take(key, relation, self.source)) is None:
                continue
            elif key == "edge_index":
                ends = self.source.ends(relation)
                self.source.graphs[relation] = edge_rows(rows, f"edge_index of {relation}", **ends)
            else:
                self.source.add_edge_table(relation, key, rows)

    def _count_matrix(self, relation: Relation, matrix: torch.Tensor) -> None:
        """Set the numbers of nodes. Raises FormatError for a matrix of another layout, and several in one."""
        dims = matrix.dim() - (0 if matrix.layout == torch.strided else matrix.dense_dim())
        what = f"'adj_t' of {describe_type(relation)}"
        if matrix.layout not in (torch.sparse_coo, torch.sparse_csr) or dims != 2:
            raise FormatError(
                f"{what} is a {dims}-dimensional tensor of layout {matrix.layout}; save edge_index or "
                "adj_t.to_sparse_csr() of one graph, or give --skip adj_t"
            )
        for ntype, count in zip(relation[::-2], matrix.shape, strict=False):
            self.source.add_nodes(ntype, count, what, skip="adj_t")

    def _add_matrix(self, relation: Relation, matrix: torch.Tensor) -> None:
        """Add the edges of adj_t, whose row v lists the sources of v, and its values as table `weight`.

        The id of an edge is the position of its entry.
        """
        source = self.source
        if matrix.layout == torch.sparse_coo:
            destinations, sources = map(TensorRows, matrix._indices())
            source.graphs[relation] = edge_list(sources, destinations, **source.ends(relation))
        else:
            source.graphs[relation] = InEdges(
                TensorRows(matrix.crow_indices()), TensorRows(matrix.col_indices()), None
            )
        add_weights(source, relation, TensorRows(_matrix_values(matrix)))


_LAYOUT = """\
Needs torch 2.6 or newer (older: to_dict() only), not torch_geometric. y: labels; train_mask, val_mask,
test_mask: splits; x and any other attribute with a row per node: tables; edge_index, or adj_t as a
sparse tensor (COO, CSR): the graph, with values other than 1 as table weight of edges; other attributes
with a row per edge: tables of edges; time: a table, and the times of nodes or edges. If there are as many
nodes as edges, "edge" in a name means edges. Values may be tensors, NumPy arrays, lists, or sparse matrices.
A plain tensor is one table, with the name of --table. Pairs to predict (edge_label_index) need --skip.
Never runs pickled code: objects of other classes (torch_sparse.SparseTensor, transforms, ...) raise an
error; save data.to_dict() without them."""

READER = Reader(
    "pyg",
    "a file of torch.save with PyG's Data or HeteroData, their to_dict(), or an InMemoryDataset of one graph",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--skip", "--table"),
)
