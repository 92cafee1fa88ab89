"""Gives named arrays their meaning: features, graph, labels, splits. Called for .npz files and directories.

Homogeneous sources mix all names in one place; heterogeneous ones have a place per node type and relation.
Every name that is not one of the known ones is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gids.convert.array_files import Found
from gids.convert.counts import numbers, row_count
from gids.convert.edges import two_rows
from gids.convert.source import InEdges, Source, TableSource
from gids.convert.sparse import SparseRows
from gids.errors import FormatError
from gids.store.names import NODE, RELATION, Relation, check_name
from gids.store.rows import Rows, blocks
from gids.write.edges import edge_list, out_edges

LABELS = ("label", "labels", "y")
MASKS = {"train_mask": "train", "val_mask": "val", "valid_mask": "val", "test_mask": "test"}
_SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
_FEATURES = ("feat", "feats", "feature", "features", "x")
_BLOCK_BYTES = 8 << 20


class NamedArrays:
    """The arrays of one place in a source; each is taken once."""

    def __init__(self, place: str, arrays: Iterable[tuple[str, Found]], source: Source) -> None:
        self._place, self._source = place, source
        self._arrays: dict[str, Found] = {}
        for name, found in arrays:
            if name in self._arrays:
                raise FormatError(f"{place} has two arrays {name!r}")
            if source.skips(name):
                continue
            if found.rows is None:
                if found.kind and (found.kind == "complex" or name in _FEATURES):
                    raise FormatError(f"{name!r} of {place} is {found.why}: cast it, or --skip {name}")
                said = source.warnings if found.kind not in ("", "text") else source.notes
                said.append(f"left out {name!r} of {place}: {found.why}")
            else:
                self._arrays[check_name(name, f"the name of an array of {place}")] = found

    def split_off(self, belongs: Callable[[str], bool]) -> NamedArrays:
        """Those whose name belongs, as arrays of their own."""
        mine = [n for n in self._arrays if belongs(n)]
        return NamedArrays(self._place, [(n, self._arrays.pop(n)) for n in mine], self._source)

    def describe(self, name: str) -> str:
        return f"{name!r} of {self._place}"

    def take(self, *names: str) -> Rows | None:
        """The array with one of these names, or None. Raises FormatError when there are two."""
        found = [n for n in names if n in self._arrays]
        if len(found) > 1:
            raise FormatError(f"{self._place} has both {found[0]!r} and {found[1]!r}, which mean the same")
        return self._arrays.pop(found[0]).rows if found else None

    def take_all(self, names: tuple[str, ...]) -> list[Rows] | None:
        """All the arrays with these names, or None when there is none of them."""
        missing = [n for n in names if n not in self._arrays]
        if len(missing) == len(names):
            return None
        if missing:
            raise FormatError(
                f"{self._place} has {', '.join(set(names) - set(missing))} but lacks {', '.join(missing)}"
            )
        return [rows for n in names if (rows := self._arrays.pop(n).rows) is not None]

    def names(self) -> list[str]:
        return list(self._arrays)

    def reject_all(self) -> None:
        """Note what lies here that has no meaning here."""
        for name in self.names():
            self.take(name)
            self._source.notes.append(
                f"left out {self.describe(name)}: it belongs to no node type or relation"
            )

    def read_nodes(self, ntype: str) -> None:
        """Take the number, labels, splits and, of all that is left, the features of a node type."""
        if (count := self.take("num_nodes")) is not None:
            self._source.add_nodes(
                ntype, numbers(count, 1, self.describe("num_nodes"))[0], self.describe("num_nodes")
            )
        if (labels := self.take(*LABELS)) is not None:
            self._source.add_nodes(ntype, row_count(labels, self.describe("label")), self.describe("label"))
            self._source.labels[ntype] = labels
        for split, prefixes in _SPLITS.items():
            self._read_split(ntype, split, prefixes)
        for name in self.names():
            rows = self.take(name)
            assert rows is not None
            self._source.add_nodes(ntype, row_count(rows, self.describe(name)), self.describe(name), name)
            self._source.tables.append(TableSource("node", ntype, name, rows))

    def _read_split(self, ntype: str, split: str, prefixes: tuple[str, ...]) -> None:
        names = [n for p in prefixes for n in (f"{p}_idx", f"{p}_mask") if n in self._arrays]
        for name in names:
            rows = self._arrays[name].rows
            if name.endswith("_idx") and rows is not None and rows.dtype == torch.bool:
                raise FormatError(
                    f"{self.describe(name)} is a mask: call it {name.removesuffix('_idx')}_mask"
                )
        ids = self.take(*(f"{p}_idx" for p in prefixes))
        mask = self.take(*(f"{p}_mask" for p in prefixes))
        if ids is not None and mask is not None:
            raise FormatError(f"{self._place} has both {prefixes[0]}_idx and {prefixes[0]}_mask")
        if mask is not None:
            self._source.add_mask(ntype, split, mask, self.describe(names[0]))
        elif ids is not None:
            self._source.splits.setdefault(ntype, {})[split] = ids

    def read_sparse_features(self, ntype: str) -> None:
        """Take attr_data, attr_indices, attr_indptr, attr_shape: a CSR matrix of features, table `feat`."""
        parts = self.take_all(("attr_data", "attr_indices", "attr_indptr", "attr_shape"))
        if parts is not None:
            row_count, width = numbers(parts[3], 2, self.describe("attr_shape"))
            rows = SparseRows(*parts[:3], shape=(row_count, width))
            self._source.add_nodes(ntype, rows.shape[0], self.describe("attr_shape"))
            self._source.tables.append(TableSource("node", ntype, "feat", rows))

    def read_sparse_graph(self, relation: Relation) -> None:
        """Take adj_*: a CSR matrix whose row u lists the nodes that u points to; weights unless all are 1."""
        parts = self.take_all(("adj_data", "adj_indices", "adj_indptr", "adj_shape"))
        if parts is None:
            return
        weights, indices, indptr, shape = parts
        num_src, num_dst = numbers(shape, 2, self.describe("adj_shape"))
        if indptr.shape != (num_src + 1,):
            raise FormatError(
                f"{self.describe('adj_indptr')} has {indptr.shape}, expected {num_src + 1} entries"
            )
        self._source.add_nodes(relation[0], num_src, self.describe("adj_shape"))
        self._source.add_nodes(relation[2], num_dst, self.describe("adj_shape"))
        self._source.graphs[relation] = out_edges(indptr, indices, num_dst=num_dst)
        if any(bool((block != 1).any()) for _, block in blocks(weights, _BLOCK_BYTES)):
            self._source.tables.append(TableSource("edge", relation, "weight", weights))

    def learn_destinations(self, relation: Relation) -> None:
        """Learn from indptr how many destination nodes there are."""
        found = self._arrays.get("indptr")
        if found is not None and found.rows is not None:
            count = row_count(found.rows, self.describe("indptr")) - 1
            self._source.add_nodes(relation[2], count, self.describe("indptr"))

    def read_graph(self, relation: Relation) -> None:
        """Take the topology of a relation, if there is one: indptr, indices (CSC) or edge_index (COO)."""
        edge_index, edge_ids = self.take("edge_index"), self.take("edge_ids")
        in_edges = self.take_all(("indptr", "indices"))
        if in_edges is not None and edge_index is not None:
            raise FormatError(f"{self._place} has both edge_index and indptr: one topology is needed")
        if edge_ids is not None and in_edges is None:
            raise FormatError(f"{self._place} has edge_ids but no indptr and indices that they belong to")
        if in_edges is not None:
            self._source.graphs[relation] = InEdges(in_edges[0], in_edges[1], edge_ids)
        elif edge_index is not None:
            sources, destinations = two_rows(edge_index, self.describe("edge_index"))
            num_src, num_dst = self._source.node_count(relation[0]), self._source.node_count(relation[2])
            self._source.graphs[relation] = edge_list(sources, destinations, num_src=num_src, num_dst=num_dst)

    def read_edge_tables(self, relation: Relation, prefix: str = "") -> None:
        """Take what is left (with a prefix) as features of a relation's edges."""
        for name in self.names():
            if name.startswith(prefix) and (rows := self.take(name)) is not None:
                self._source.tables.append(TableSource("edge", relation, name.removeprefix(prefix), rows))


def read_homogeneous(arrays: NamedArrays, source: Source) -> None:
    """All arrays of a graph with one node type and one relation; `edge_KEY` is a feature of edges."""
    arrays.read_sparse_features(NODE)
    arrays.read_sparse_graph(RELATION)
    edges = arrays.split_off(lambda name: name in ("indptr", "indices") or name.startswith("edge_"))
    edges.learn_destinations(RELATION)
    arrays.read_nodes(NODE)
    edges.read_graph(RELATION)
    edges.read_edge_tables(RELATION, prefix="edge_")
