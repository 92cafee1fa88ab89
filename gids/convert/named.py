"""Gives named arrays their meaning: features, graph, labels, splits. Called for .npz files and directories.

A homogeneous source has all names in one folder or file; a heterogeneous one has a folder per node type and
relation. A name that is not known is the name of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import torch

from gids.convert.array_files import Found, open_npy, open_npz, open_raw
from gids.convert.edges import add_weights, edge_rows
from gids.convert.source import LABELS, InEdges, Source, numbers, row_count
from gids.convert.sparse import SparseRows, as_sparse_parts, is_scipy_sparse
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name
from gids.store.rows import Rows
from gids.write.edges import out_edges

_SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
_FEATURES = ("feat", "feats", "feature", "features", "x")


def directory_arrays(
    folder: Path,
    scratch: Path,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    leave_out: Container[Path] = (),
) -> Iterator[tuple[str, Found]]:
    """(name, array) of each .npy, .npz member and .bin in a directory, by file name."""
    for path in sorted(p for p in folder.iterdir() if p not in leave_out):
        if path.suffix == ".npy":
            yield path.stem, open_npy(path)
        elif path.suffix == ".npz":
            found = open_npz(path, scratch)
            if is_scipy_sparse(found):
                if path.stem not in ("adj", "attr"):
                    raise FormatError(
                        f"{path} is a SciPy sparse matrix: call it adj.npz (graph) or attr.npz (features)"
                    )
                found = as_sparse_parts(path, found, path.stem)
            yield from found.items()
        elif path.suffix == ".bin":
            yield path.stem, Found(open_raw(path, dtype, shape))
        elif path.is_file():
            why = "not .npy, .npz or .bin; an edge list is called edges.csv, .tsv or .txt"
            if path.suffix == ".parquet":
                why = "call the tables nodes.parquet and edges.parquet"
            yield path.name, Found(None, why=why)


class NamedArrays:
    """The arrays of one file or folder (`where`). Each is taken once."""

    def __init__(self, where: str, arrays: Iterable[tuple[str, Found]], source: Source) -> None:
        self._where, self._source = where, source
        self._arrays: dict[str, Rows] = {}
        for name, found in arrays:
            if name in self._arrays:
                raise FormatError(f"{where} has two arrays {name!r}")
            if source.skips(name):
                continue
            if found.rows is not None:
                self._arrays[check_name(name, f"the name of an array of {where}")] = found.rows
                continue
            if found.kind and (found.kind == "complex" or name in _FEATURES):
                raise FormatError(f"{name!r} of {where} is {found.why}: cast it, or give --skip {name}")
            source.leave_out(f"{name!r} of {where}", found.why)

    def split_off(self, belongs: Callable[[str], bool]) -> NamedArrays:
        """Move the arrays whose name belongs to a new NamedArrays."""
        other = NamedArrays(self._where, (), self._source)
        other._arrays = {n: self._arrays.pop(n) for n in list(self._arrays) if belongs(n)}
        return other

    def describe(self, name: str) -> str:
        return f"{name!r} of {self._where}"

    def take(self, *names: str) -> Rows | None:
        """The array with one of these names, or None. Raises FormatError if there are two."""
        found = [n for n in names if n in self._arrays]
        if len(found) > 1:
            raise FormatError(
                f"{self._where} has both {found[0]!r} and {found[1]!r}, which mean the same: keep one"
            )
        return self._arrays.pop(found[0]) if found else None

    def take_all(self, names: tuple[str, ...]) -> list[Rows] | None:
        """All arrays with these names, or None if there is none. Raises FormatError if some are missing."""
        missing = [n for n in names if n not in self._arrays]
        if len(missing) == len(names):
            return None
        if missing:
            raise FormatError(
                f"{self._where} has {', '.join(set(names) - set(missing))} but lacks {', '.join(missing)}"
            )
        return [self._arrays.pop(n) for n in names]

    def rest(self) -> list[tuple[str, Rows]]:
        """Take all arrays that are left."""
        taken, self._arrays = list(self._arrays.items()), {}
        return taken

    def reject_all(self) -> None:
        """Note the arrays that belong to no node type or relation."""
        for name, _ in self.rest():
            self._source.leave_out(self.describe(name), "it belongs to no node type or relation")

    def read_nodes(self, ntype: str) -> None:
        """Take the number, labels and splits of a node type; all other arrays are its features."""
        if (count := self.take("num_nodes")) is not None:
            what = self.describe("num_nodes")
            self._source.add_nodes(ntype, numbers(count, 1, what)[0], what)
        if (labels := self.take(*LABELS)) is not None:
            self._source.add_labels(ntype, labels, self.describe("label"))
        masks = [self._take_split(ntype, split, prefixes) for split, prefixes in _SPLITS.items()]
        for name, rows in self.rest():
            self._source.add_node_table(ntype, name, rows, self.describe(name), skip=name)
        for split, mask in zip(_SPLITS, masks, strict=True):
            if mask is not None:
                self._source.add_mask(ntype, split, *mask)

    def _take_split(self, ntype: str, split: str, prefixes: tuple[str, ...]) -> tuple[Rows, str] | None:
        """Take the ids of a split, or its mask. Returns the mask and its name in messages."""
        names = [n for p in prefixes for n in (f"{p}_idx", f"{p}_mask") if n in self._arrays]
        for name in names:
            if name.endswith("_idx") and self._arrays[name].dtype == torch.bool:
                raise FormatError(
                    f"{self.describe(name)} is a mask: rename it to {name.removesuffix('_idx')}_mask"
                )
        ids = self.take(*(f"{p}_idx" for p in prefixes))
        mask = self.take(*(f"{p}_mask" for p in prefixes))
        if ids is not None and mask is not None:
            raise FormatError(f"{self._where} has both {prefixes[0]}_idx and {prefixes[0]}_mask: keep one")
        if ids is not None:
            self._source.add_split(ntype, split, ids)
        return None if mask is None else (mask, self.describe(names[0]))

    def read_sparse_features(self, ntype: str) -> None:
        """Take attr_data, attr_indices, attr_indptr, attr_shape: a CSR matrix of features, table `feat`."""
        parts = self.take_all(("attr_data", "attr_indices", "attr_indptr", "attr_shape"))
        if parts is not None:
            row_count, width = numbers(parts[3], 2, self.describe("attr_shape"))
            rows = SparseRows(*parts[:3], shape=(row_count, width))
            self._source.add_node_table(ntype, "feat", rows, self.describe("attr_shape"))

    def read_sparse_graph(self, relation: Relation) -> None:
        """Take adj_*: a CSR matrix, row u lists the destinations of u. Weights other than 1 are a table."""
        parts = self.take_all(("adj_data", "adj_indices", "adj_indptr", "adj_shape"))
        if parts is None:
            return
        weights, indices, indptr, shape = parts
        num_src, num_dst = numbers(shape, 2, self.describe("adj_shape"))
        if indptr.shape != (num_src + 1,):
            raise FormatError(
                f"{self.describe('adj_indptr')} has shape {indptr.shape}; it must have {num_src + 1} entries"
            )
        self._source.add_nodes(relation[0], num_src, self.describe("adj_shape"))
        self._source.add_nodes(relation[2], num_dst, self.describe("adj_shape"))
        self._source.graphs[relation] = out_edges(indptr, indices, num_dst=num_dst)
        add_weights(self._source, relation, weights)

    def learn_destinations(self, relation: Relation) -> None:
        """Set the number of destination nodes from indptr."""
        if (indptr := self._arrays.get("indptr")) is not None:
            what = self.describe("indptr")
            self._source.add_nodes(relation[2], row_count(indptr, what) - 1, what)

    def read_graph(self, relation: Relation) -> None:
        """Take the graph of a relation, if there is one: indptr, indices (CSC) or edge_index (COO)."""
        edge_index, edge_ids = self.take("edge_index"), self.take("edge_ids")
        in_edges = self.take_all(("indptr", "indices"))
        if in_edges is not None and edge_index is not None:
            raise FormatError(f"{self._where} has both edge_index and indptr: keep one of the two graphs")
        if edge_ids is not None and in_edges is None:
            raise FormatError(f"{self._where} has edge_ids but no indptr and indices")
        if in_edges is not None:
            self._source.graphs[relation] = InEdges(in_edges[0], in_edges[1], edge_ids)
        elif edge_index is not None:
            self._source.graphs[relation] = edge_rows(
                edge_index, self.describe("edge_index"), **self._source.ends(relation)
            )

    def read_edge_tables(self, relation: Relation, prefix: str = "") -> None:
        """Take all arrays that are left as features of edges. Removes a prefix of their names."""
        for name, rows in self.rest():
            self._source.add_edge_table(relation, name.removeprefix(prefix), rows)


def read_homogeneous(arrays: NamedArrays, source: Source) -> None:
    """All arrays of a graph with one node type and one relation. `edge_KEY` is a feature of edges."""
    arrays.read_sparse_features(NODE)
    arrays.read_sparse_graph(RELATION)
    edges = arrays.split_off(lambda name: name in ("indptr", "indices") or name.startswith("edge_"))
    edges.learn_destinations(RELATION)
    arrays.read_nodes(NODE)
    edges.read_graph(RELATION)
    edges.read_edge_tables(RELATION, prefix="edge_")
