"""Reads saved graphs of PyTorch Geometric: Data, HeteroData, their to_dict(), and InMemoryDataset's files.

Does not need torch_geometric: torch_file loads its objects as records of their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gids.convert.damage import shown
from gids.convert.edges import count_by_edges, edge_rows, largest_id
from gids.convert.readers.reader import Choices, Reader
from gids.convert.source import InEdges, Source, whole_number
from gids.convert.times import find_times
from gids.convert.torch_file import is_torch_file, load_torch, mapped_rows
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name, describe_type
from gids.store.rows import Rows, TensorRows

# PyG recognises these by name, and all others by size.
_OF_NODES = ("x", "feat", "pos", "batch", "node_type", "n_id")
_OF_EDGES = ("edge_index", "edge_weight", "edge_attr", "edge_type", "e_id", "adj", "adj_t")
_SPLITS = {"train_idx": "train", "val_idx": "val", "valid_idx": "val", "test_idx": "test"}
_SAVE = "save data.to_dict() with torch.save"


def _recognises(path: Path) -> bool:
    """By content, or by name for a truncated file."""
    return is_torch_file(path) or (path.is_file() and path.suffix in (".pt", ".pth"))


def _read(path: Path, scratch: Path, choices: Choices) -> Source:
    stores = _stores(load_torch(path), path)
    graph = _Graph(path, Source(skip=choices.skip))
    for key, store in stores.items():
        if isinstance(key, str):
            graph.add_nodes(key, store)
    graph.count_ends(stores)
    for key, store in stores.items():
        if not isinstance(key, str):
            graph.add_edges(key, store)
    find_times(graph.source, ("time",))
    return graph.source


def _stores(saved: Any, path: Path) -> dict[str | Relation, Mapping[str, Any]]:
    """The attributes of each node type and relation of the saved object."""
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
        return _typed({**nodes, **edges}, path)
    if "_store" in fields:
        return _by_size(_attributes(fields["_store"], path), path)
    if any(isinstance(key, tuple) for key in fields) or "_global_store" in fields:
        return _typed({key: store for key, store in fields.items() if key != "_global_store"}, path)
    return _by_size(_attributes(fields, path), path)


def _typed(stores: Mapping[Any, Any], path: Path) -> dict[str | Relation, Mapping[str, Any]]:
    """The attributes by node type and relation. Raises FormatError for another key."""
    for key in stores:
        for name in key if isinstance(key, tuple) and len(key) == 3 else (key,):
            check_name(name, f"a node type or relation of {path}")
    return {key: _attributes(store, path) for key, store in stores.items()}


def _fields(saved: Any) -> Mapping[str, Any]:
    """The fields of a Record, of PyG's own class if PyG is imported, or of a dictionary."""
    found = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    return found if isinstance(found, Mapping) else {}


def _mapping(store: Any, path: Path) -> Mapping[str, Any]:
    found = store if isinstance(store, Mapping) else _fields(store).get("_mapping")
    if not isinstance(found, Mapping):
        raise FormatError(f"{path} was saved by an unknown version of PyG; {_SAVE}")
    return found


def _attributes(store: Any, path: Path) -> Mapping[str, Any]:
    """The attributes of one store. Raises FormatError for a name that is not text."""
    found = _mapping(store, path)
    for key in found:
        if not isinstance(key, str):
            raise FormatError(f"{path} has an attribute called {shown(key)}; names must be text")
    return found


def _by_size(fields: Mapping[str, Any], path: Path) -> dict[str | Relation, Mapping[str, Any]]:
    """The attributes of a Data's nodes and of its edges, separated by size as PyG does.

    If there are as many nodes as edges, attributes with "edge" in their name are of edges.
    """
    links, edge_count = _links(fields), _edge_count(fields)
    rows = {k: len(v) for k, v in fields.items() if isinstance(v, torch.Tensor) and v.dim()}
    unclear = {k for k in rows if rows[k] == edge_count or k.startswith("edge_")}
    node_count = _node_count(fields, path) if unclear - {*_OF_EDGES, *_OF_NODES, *links} else None

    def is_of_edges(key: str) -> bool:
        if key in _OF_EDGES or key in links or key in _OF_NODES or key not in unclear:
            return key in _OF_EDGES or key in links
        return rows[key] != node_count or (rows[key] == edge_count and "edge" in key)

    return {
        NODE: {k: v for k, v in fields.items() if not is_of_edges(k)},
        RELATION: {k: v for k, v in fields.items() if is_of_edges(k)},
    }


def _edge_count(fields: Mapping[str, Any]) -> int | None:
    edges, adjacency = fields.get("edge_index"), fields.get("adj_t")
    if isinstance(edges, torch.Tensor) and edges.dim() == 2:
        return edges.shape[1]
    if isinstance(adjacency, torch.Tensor) and adjacency.layout == torch.sparse_csr:
        return len(adjacency.col_indices())
    return None


def _node_count(fields: Mapping[str, Any], path: Path) -> int | None:
    """The number that PyG infers, from the edges if there is nothing else."""
    if isinstance(count := fields.get("num_nodes"), (int, torch.Tensor)):
        return whole_number(count, f"num_nodes of {path}")
    tensors = {k: v for k, v in fields.items() if isinstance(v, torch.Tensor) and v.dim()}
    named = [k for k in tensors if k in _OF_NODES] + [k for k in tensors if "node" in k]
    if named:
        return len(tensors[named[0]])
    if "adj_t" in tensors and tensors["adj_t"].dim() == 2:
        return tensors["adj_t"].shape[1]
    if (edges := tensors.get("edge_index")) is None or edges.dim() != 2 or len(edges) != 2:
        return None
    return max(1 + largest_id(mapped_rows(row, path)) for row in edges)


def _links(store: Mapping[str, Any]) -> set[str]:
    """Names of pairs to predict, which RandomLinkSplit adds: K_index of shape (2, n), and K, the labels."""
    found = set()
    for key, pairs in store.items():
        name = key.removesuffix("_index")
        if name == key or key == "edge_index" or not isinstance(pairs, torch.Tensor) or pairs.dim() != 2:
            continue
        labels = store.get(name)
        labelled = isinstance(labels, torch.Tensor) and labels.shape[:1] == pairs.shape[1:]
        if len(pairs) == 2 and (labelled or "edge" in name):
            found |= {key, name} if labelled else {key}
    return found


class _Graph:
    """Makes a Source from the stores of a file."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self.source = path, source

    def add_nodes(self, ntype: str, store: Mapping[str, Any]) -> None:
        if isinstance(count := store.get("num_nodes"), (int, torch.Tensor)):
            what = f"num_nodes of {ntype!r}"
            self.source.add_nodes(ntype, whole_number(count, what), what)
        for key, values in store.items():
            if key == "num_nodes" or self.source.skips(key):
                continue
            if (rows := self._rows(key, ntype, values)) is None:
                continue
            if key in _SPLITS:
                self.source.add_split(ntype, _SPLITS[key], rows)
            else:
                what = f"{key!r} of {ntype!r} in {self._path}"
                self.source.add_node_array(ntype, key, rows, what, skip=key)

    def count_ends(self, stores: Mapping[str | Relation, Mapping[str, Any]]) -> None:
        """Set the numbers of nodes that only the edges give, as PyG does."""
        ends = []
        for relation, store in stores.items():
            edges = store.get("edge_index")
            if isinstance(relation, str) or not isinstance(edges, torch.Tensor) or edges.dim() != 2:
                continue
            for row, ntype in zip(edges, (relation[0], relation[2]), strict=False):
                if ntype not in self.source.nodes:
                    ends.append((ntype, mapped_rows(row, self._path)))
        count_by_edges(self.source, ends)

    def add_edges(self, relation: Relation, store: Mapping[str, Any]) -> None:
        links, count = _links(store), _edge_count(store)
        for key, values in store.items():
            if self.source.skips(key):
                continue
            if key in links:
                self.source.notes.append(
                    f"left out {key!r} of {relation!r}: a dataset has no pairs to predict; load them from "
                    f"{self._path}"
                )
            elif key == "adj_t" and isinstance(values, torch.Tensor) and values.layout == torch.sparse_csr:
                self.source.add_nodes(relation[2], values.shape[0], "adj_t")
                self.source.add_nodes(relation[0], values.shape[1], "adj_t")
                in_edges = InEdges(TensorRows(values.crow_indices()), TensorRows(values.col_indices()), None)
                self.source.graphs[relation] = in_edges
            elif (rows := self._rows(key, relation, values)) is None:
                continue
            elif key == "edge_index":
                ends = self.source.ends(relation)
                self.source.graphs[relation] = edge_rows(rows, f"edge_index of {relation}", **ends)
            elif count is not None and rows.shape[0] != count:
                raise FormatError(
                    f"relation {describe_type(relation)} has {count} edges, but its table {key!r} has "
                    f"{rows.shape[0]} rows; leave it out with --skip {key}"
                )
            else:
                self.source.add_edge_table(relation, key, rows)

    def _rows(self, key: str, where: str | Relation, values: Any) -> Rows | None:
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided or not values.dim():
            self.source.notes.append(f"left out {key!r} of {where!r}: a {_describe(values)}")
            return None
        return mapped_rows(values, self._path)


def _describe(values: Any) -> str:
    if isinstance(values, torch.Tensor):
        return f"tensor of layout {values.layout}" if values.dim() else "single number"
    return type(values).__name__


_LAYOUT = """\
Needs torch 2.6 or newer (older: to_dict() only), not torch_geometric. y: labels; train_mask, val_mask,
test_mask: splits; x and any other attribute with a row per node: tables; edge_index (or adj_t as
torch.sparse_csr): the graph; other attributes with a row per edge: tables of edges; time: a table, and
the times of nodes or edges. If there are as many nodes as edges, "edge" in a name means edges. Leaves
out edge_label_index and edge_label (pairs to predict). Never runs pickled code: objects of other classes
(torch_sparse.SparseTensor, transforms, ...) raise an error; save data.to_dict() without them."""

READER = Reader(
    "pyg",
    "a file of torch.save with PyG's Data or HeteroData, their to_dict(), or an InMemoryDataset of one graph",
    _LAYOUT,
    _recognises,
    _read,
    takes=("--skip",),
)
