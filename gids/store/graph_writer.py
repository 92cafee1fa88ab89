"""Writes the topology of one relation: indptr, indices, edge ids. Called by DatasetWriter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gids.errors import FormatError
from gids.store.array_file import ArrayFile
from gids.store.edge_sort import EdgeSorter
from gids.store.manifest import ArrayEntry
from gids.store.names import Relation, encode_path
from gids.store.rows import Rows
from gids.store.topology import EdgeSource, checked_ids, checked_indptr

_PIECE_BYTES = 8 << 20


class GraphWriter:
    """The files of one relation, empty at first. Use as a context manager; write once, by either method.

    root: the dataset's directory. index_dtype: of indices and edge ids. on_bytes(n): progress, 8 per edge.
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
                f"int32 cannot number {num_src} nodes and {edge_count} edges; use int64 indices"
            )
        self._num_src, self._num_dst, self._edge_count = num_src, num_dst, edge_count
        self._on_bytes = on_bytes
        self._are_positions = True  # whether every edge's id is its position, and need not be kept
        self._position = 0
        folder = f"graph/{encode_path(*relation)}"
        self._indptr = ArrayFile(root, f"{folder}/indptr.npy", "int64", (num_dst + 1,))
        self._indices = ArrayFile(root, f"{folder}/indices.npy", index_dtype, (edge_count,))
        self._edge_ids = ArrayFile(root, f"{folder}/edge_ids.npy", index_dtype, (edge_count,))

    def write_in_edges(self, indptr: Rows, indices: Rows, edge_ids: Rows | None) -> dict[str, ArrayEntry]:
        """Copy arrays that are sorted by destination, checking them. Raises FormatError."""
        for values in checked_indptr(indptr, self._edge_count, _PIECE_BYTES):
            self._indptr.append(values)
        for values in checked_ids(indices, self._num_src, "indices", _PIECE_BYTES):
            self._indices.append(values)
            self._on_bytes(values.nbytes)
        if edge_ids is not None:
            for values in checked_ids(edge_ids, self._edge_count, "edge_ids", _PIECE_BYTES):
                self._append_ids(values)
        return self._finish(self._are_positions)

    def write_sorted(
        self, edges: EdgeSource, scratch: Path, memory_bytes: int, *, keep_ids: bool
    ) -> dict[str, ArrayEntry]:
        """Sort edges by destination, stably, and write them. Raises FormatError for ids out of range."""
        total = 0
        self._indptr.append(np.zeros(1, np.int64))

        def on_degrees(degrees: np.ndarray) -> None:
            nonlocal total
            ends = total + np.cumsum(degrees)
            self._indptr.append(ends)
            total = int(ends[-1])

        def on_edges(sources: np.ndarray, ids: np.ndarray) -> None:
            self._indices.append(sources)
            self._append_ids(ids)
            self._on_bytes(ids.nbytes)

        if self._num_dst:
            EdgeSorter(scratch, memory_bytes, on_degrees, on_edges).sort(
                edges.pieces, edges.count, 0, self._num_dst
            )
        elif edges.count:
            raise FormatError(f"there are {edges.count} edges to a type without nodes")
        return self._finish(self._are_positions or not keep_ids)

    def _append_ids(self, ids: np.ndarray) -> None:
        self._edge_ids.append(ids)
        expected = np.arange(self._position, self._position + len(ids))
        self._are_positions = self._are_positions and np.array_equal(ids, expected)
        self._position += len(ids)

    def _finish(self, drop_ids: bool) -> dict[str, ArrayEntry]:
        entries = {"indptr": self._indptr.finish(), "indices": self._indices.finish()}
        if drop_ids:
            self._edge_ids.discard()
        else:
            entries["edge_ids"] = self._edge_ids.finish()
        return entries

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for file in (self._indptr, self._indices, self._edge_ids):
                stack.push(file)
