"""Writes the topology of one relation: indptr, indices, edge ids. Called by DatasetWriter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gids.closing import Closing
from gids.errors import FormatError
from gids.store.dtypes import UINT64, is_whole
from gids.store.manifest import ArrayEntry
from gids.store.names import Relation, encode_path
from gids.store.rows import Rows, blocks, checked_ids, checked_indptr
from gids.write.edges import EdgeSorter, EdgeSource
from gids.write.files import ArrayFile

_PIECE_BYTES = 8 << 20


def chosen_index_dtype(index_dtype: str, num_src: int, edge_count: int) -> str:
    """index_dtype; of "auto": int32 where all numbers fit."""
    if index_dtype != "auto":
        return index_dtype
    return "int32" if max(num_src, edge_count) <= 1 << 31 else "int64"


class GraphWriter(Closing):
    """The files of one relation. Use as a context manager; call one of the two write methods once.

    root: the dataset's directory. edge_count: the number of edges, or, with dedup, an upper bound.
    index_dtype: type of indices and edge ids. keep_ids: write edge ids, unless all ids are positions.
    time_dtype: type of the times of edges, if they are to be written. on_bytes(n): progress, 8 bytes per
    edge.
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
        keep_ids: bool,
        on_bytes: Callable[[int], None],
        dedup: bool = False,
        time_dtype: str | None = None,
    ) -> None:
        index_dtype = chosen_index_dtype(index_dtype, num_src, edge_count)
        if index_dtype == "int32" and max(num_src, edge_count) > 1 << 31:
            raise FormatError(
                f"int32 is too small for {num_src} nodes and {edge_count} edges: use int64 indices"
            )
        self._num_src, self._num_dst, self._edge_count = num_src, num_dst, edge_count
        self._dedup, self._on_bytes = dedup, on_bytes
        self._are_positions = True  # whether the id of every edge so far is its position
        self._position = 0
        self._stack = contextlib.ExitStack()

        def array(role: str, dtype: str, shape: tuple[int, ...] | None) -> ArrayFile:
            path = f"graph/{encode_path(*relation)}/{role}.npy"
            return self._stack.enter_context(ArrayFile(root, path, dtype, shape))

        edges = None if dedup else (edge_count,)
        self._indptr = array("indptr", "int64", (num_dst + 1,))
        self._indices = array("indices", index_dtype, edges)
        self._edge_ids = array("edge_ids", index_dtype, edges) if keep_ids else None
        self._times = array("time", time_dtype, edges) if time_dtype is not None else None

    def write_in_edges(self, indptr: Rows, indices: Rows, edge_ids: Rows | None) -> dict[str, ArrayEntry]:
        """Check and copy arrays that are sorted by destination. Raises FormatError."""
        for values in checked_indptr(indptr, self._edge_count, _PIECE_BYTES):
            self._indptr.append(values)
        for values in checked_ids(indices, self._num_src, "indices", _PIECE_BYTES):
            self._indices.append(values)
            self._on_bytes(values.nbytes)
        if edge_ids is not None:
            for values in checked_ids(edge_ids, self._edge_count, "edge_ids", _PIECE_BYTES):
                self._append_ids(values)
        return self._finish()

    def write_sorted(
        self,
        edges: EdgeSource,
        scratch: Path,
        memory_bytes: int,
        *,
        sort_neighbors: bool,
        workers: int,
        times_of: TimesOf | None = None,
    ) -> dict[str, ArrayEntry]:
        """Sort edges by destination, stably, and write them. Raises FormatError for ids out of range.

        times_of: sorts the edges of each destination by these times, and those of equal times by their ids.
        """
        end = 0
        held: list[tuple[np.ndarray, np.ndarray]] = []  # of the destination whose edges are not complete
        self._indptr.append(np.zeros(1, np.int64))

        def write(degrees: np.ndarray, sources: np.ndarray, ids: np.ndarray) -> None:
            nonlocal end
            if times_of is not None:
                held.append((sources, ids))
                if not len(degrees):
                    return
                sources, ids = (np.concatenate(parts) for parts in zip(*held, strict=True))
                held.clear()
                times = times_of(sources, ids)
                destinations = np.repeat(np.arange(len(degrees)), degrees)
                keys = [times, destinations]
                if bool(((ids[1:] < ids[:-1]) & (destinations[1:] == destinations[:-1])).any()):
                    keys.insert(0, ids)  # a third key doubles the time
                order = np.lexsort(keys)
                sources, ids = sources[order], ids[order]
                if self._times is not None:
                    self._times.append(times[order])
            if len(degrees):
                ends = end + np.cumsum(degrees)
                self._indptr.append(ends)
                end = int(ends[-1])
            self._indices.append(sources)
            self._append_ids(ids)
            self._on_bytes(ids.nbytes)

        if not self._num_dst and edges.count:
            raise FormatError(f"there are {edges.count} edges, but the destination type has no nodes")
        if self._num_dst:
            EdgeSorter(
                scratch,
                memory_bytes,
                write,
                workers=workers,
                num_src=edges.num_src if sort_neighbors or self._dedup else None,
                dedup=self._dedup,
            ).sort(edges.pieces, edges.count, 0, self._num_dst)
        return self._finish()

    def _append_ids(self, ids: np.ndarray) -> None:
        if self._edge_ids is None:
            return
        self._edge_ids.append(ids)
        expected = np.arange(self._position, self._position + len(ids))
        self._are_positions = self._are_positions and np.array_equal(ids, expected)
        self._position += len(ids)

    def _finish(self) -> dict[str, ArrayEntry]:
        entries = {"indptr": self._indptr.finish(), "indices": self._indices.finish()}
        if self._edge_ids is not None and self._are_positions:
            self._edge_ids.discard()
        elif self._edge_ids is not None:
            entries["edge_ids"] = self._edge_ids.finish()
        if self._times is not None:
            entries["time"] = self._times.finish()
        return entries

    def close(self) -> None:
        self._stack.close()


TimesOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The times of edges with these sources and ids, int64 each."""


def scratch_times(times: Rows, path: Path) -> np.ndarray:
    """The times in a scratch file, int64[n], memory-mapped, to be read in any order."""
    with open(path, "wb") as file:
        for _, block in blocks(times, _PIECE_BYTES):
            file.write(np.ascontiguousarray(block.numpy(), np.int64).data)
    count = times.shape[0]
    return np.memmap(path, np.int64, "r", shape=(count,)) if count else np.empty(0, np.int64)


def time_dtype(times: Rows) -> str:
    """The type that times are stored in: int32 if they fit."""
    values = (block.numpy() for _, block in blocks(times, _PIECE_BYTES))
    return "int32" if all(v.min() >= -(1 << 31) and v.max() < 1 << 31 for v in values) else "int64"


def check_times(times: Rows, count: int, owner: str) -> None:
    """Raise FormatError unless these are whole numbers, one for each of `count` nodes or edges."""
    if times.shape != (count,) or not is_whole(times.dtype) or times.dtype == UINT64:
        described = f"{str(times.dtype).removeprefix('torch.')}{list(times.shape)}"
        raise FormatError(f"times of {owner} are {described}; they must be whole numbers, int64[{count}]")
