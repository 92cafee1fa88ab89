"""Writes the topology of one relation: indptr, indices, edge ids. Called by DatasetWriter.

The header of a file needs the number of edges. So if duplicates are removed, the sorted edges are first
written to a scratch file, and copied when their number is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.array_checks import checked_ids, checked_indptr
from gids.store.manifest import ArrayEntry
from gids.store.names import Relation, encode_path
from gids.store.rows import FileRows, Rows, blocks
from gids.write.array_file import ArrayFile
from gids.write.edge_sort import EdgeSorter
from gids.write.edges import EdgeSource

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class EdgeOrder:
    """Options of sorting by destination.

    keep_ids: write edge ids. sort_neighbors: sort the edges of one destination by source; else they keep
    their order. dedup: remove duplicate edges, which sorts neighbors; needs keep_ids=False.
    """

    keep_ids: bool = True
    sort_neighbors: bool = False
    dedup: bool = False

    def __post_init__(self) -> None:
        if self.dedup and self.keep_ids:
            raise ValueError("dedup removes edges, so ids would have gaps: give keep_ids=False")


class GraphWriter:
    """The files of one relation. Use as a context manager; call one of the two write methods once.

    root: the dataset's directory. index_dtype: type of indices and edge ids. on_bytes(n): progress, 8 bytes
    per edge.
    """

    def __init__(
        self,
        root: Path,
        relation: Relation,
        *,
        num_src: int,
        num_dst: int,
        edge_count: int,
        index_dtype: str,
        on_bytes: Callable[[int], None],
    ) -> None:
        if index_dtype == "int32" and max(num_src, edge_count) > 1 << 31:
            raise FormatError(
                f"int32 is too small for {num_src} nodes and {edge_count} edges: use int64 indices"
            )
        self._num_src, self._num_dst, self._edge_count = num_src, num_dst, edge_count
        self._on_bytes = on_bytes
        self._are_positions = True  # whether the id of every edge is its position and need not be stored
        self._position = 0
        folder = f"graph/{encode_path(*relation)}"
        self._indptr = ArrayFile(root, f"{folder}/indptr.npy", "int64", (num_dst + 1,))
        self._root, self._folder, self._index_dtype = root, folder, index_dtype
        self._indices: ArrayFile | None = None
        self._edge_ids: ArrayFile | None = None

    def _open_edges(self, edge_count: int, *, with_ids: bool) -> ArrayFile:
        """Open the files with one entry per edge."""
        files = {}
        for role in ("indices", *(("edge_ids",) if with_ids else ())):
            files[role] = ArrayFile(
                self._root, f"{self._folder}/{role}.npy", self._index_dtype, (edge_count,)
            )
        self._indices, self._edge_ids = files["indices"], files.get("edge_ids")
        return files["indices"]

    def write_in_edges(self, indptr: Rows, indices: Rows, edge_ids: Rows | None) -> dict[str, ArrayEntry]:
        """Check and copy arrays that are sorted by destination. Raises FormatError."""
        indices_file = self._open_edges(self._edge_count, with_ids=edge_ids is not None)
        for values in checked_indptr(indptr, self._edge_count, _PIECE_BYTES):
            self._indptr.append(values)
        for values in checked_ids(indices, self._num_src, "indices", _PIECE_BYTES):
            indices_file.append(values)
            self._on_bytes(values.nbytes)
        if edge_ids is not None:
            for values in checked_ids(edge_ids, self._edge_count, "edge_ids", _PIECE_BYTES):
                self._append_ids(values)
        return self._finish(self._are_positions)

    def write_sorted(
        self, edges: EdgeSource, scratch: Path, memory_bytes: int, order: EdgeOrder, *, workers: int
    ) -> dict[str, ArrayEntry]:
        """Sort edges by destination, stably, and write them. Raises FormatError for ids out of range."""
        total = 0
        spooled = scratch / "sorted-edges"
        self._indptr.append(np.zeros(1, np.int64))

        def on_degrees(degrees: np.ndarray) -> None:
            nonlocal total
            ends = total + np.cumsum(degrees)
            self._indptr.append(ends)
            total = int(ends[-1])

        def on_edges(sources: np.ndarray, ids: np.ndarray) -> None:
            if order.dedup:
                spool.write(np.ascontiguousarray(sources).data)
                return
            assert self._indices is not None
            self._indices.append(sources)
            if order.keep_ids:
                self._append_ids(ids)
            self._on_bytes(ids.nbytes)

        if not self._num_dst and edges.count:
            raise FormatError(f"there are {edges.count} edges, but the destination type has no nodes")
        with contextlib.ExitStack() as stack:
            if order.dedup:
                spool = stack.enter_context(open(spooled, "wb"))
            else:
                self._open_edges(edges.count, with_ids=order.keep_ids)
            if self._num_dst:
                by_source = edges.num_src if order.sort_neighbors or order.dedup else None
                EdgeSorter(
                    scratch,
                    memory_bytes,
                    on_degrees,
                    on_edges,
                    workers=workers,
                    num_src=by_source,
                    dedup=order.dedup,
                ).sort(edges.pieces, edges.count, 0, self._num_dst)
        if order.dedup:
            self._copy_spooled(spooled, total)
        return self._finish(self._are_positions)

    def _copy_spooled(self, spooled: Path, edge_count: int) -> None:
        indices = self._open_edges(edge_count, with_ids=False)
        for _, block in blocks(FileRows(spooled, (edge_count,), torch.int64), _PIECE_BYTES):
            indices.append(block.numpy())
            self._on_bytes(block.nbytes)
        spooled.unlink()

    def _append_ids(self, ids: np.ndarray) -> None:
        assert self._edge_ids is not None
        self._edge_ids.append(ids)
        expected = np.arange(self._position, self._position + len(ids))
        self._are_positions = self._are_positions and np.array_equal(ids, expected)
        self._position += len(ids)

    def _finish(self, drop_ids: bool) -> dict[str, ArrayEntry]:
        assert self._indices is not None
        entries = {"indptr": self._indptr.finish(), "indices": self._indices.finish()}
        if self._edge_ids is not None and drop_ids:
            self._edge_ids.discard()
        elif self._edge_ids is not None:
            entries["edge_ids"] = self._edge_ids.finish()
        return entries

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for file in (self._indptr, self._indices, self._edge_ids):
                if file is not None:
                    stack.push(file)
