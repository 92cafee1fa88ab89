"""Orders of rows, which decide the rows that share a page: by degree or by community.

Called by conversion and by `gids bench hit-ratio`. An order is an array with the position of each row, int32
or int64[row_count].

ScatteredRows has the rows in an order, from a source that is read once, from front to back. Two passes, both
in long pieces: first, every row is written to the bucket of its position in a scratch file. Then one bucket
at a time is sorted in memory, when the writer of the table reads it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError, StorageError
from gids.store.dtypes import byte_view
from gids.store.geometry import div_ceil
from gids.store.manifest import position_dtype
from gids.store.rows import MARK_ROWS, Rows, read_exactly, read_range
from gids.write.files import sync_files

_SHARE = 6  # a bucket takes 1/6 of memory: two are held sorted, one as read
_SYNC_BYTES = 256 << 20
_HELD = 2  # sorted buckets: threads that read neighboring rows may need two


class ScatteredRows:
    """The rows of a source in the order of their positions. Making it reads the source once.

    order: positions, int32 or int64[row_count]. path: the scratch file, of `bytes_needed`; made here, removed
    by the caller. Takes up to memory_bytes of memory.
    """

    def __init__(self, rows: Rows, order: np.ndarray, path: Path, memory_bytes: int) -> None:
        self.shape, self.dtype = rows.shape, rows.dtype
        self._rows, self._order, self._path = rows, order, path
        self._row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
        self._record_bytes = self._row_bytes + _core.SLOT_BYTES
        self._bucket_rows = _bucket_rows_for(rows, memory_bytes)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, bytes_needed(rows))
        self._lock = threading.Lock()
        self._buckets: dict[int, np.ndarray] = {}
        self._scatter()

    def _scatter(self) -> None:
        """Write every row to the bucket of its position."""
        count, unsynced_bytes = self.shape[0], 0
        filled = np.zeros(div_ceil(count, self._bucket_rows), np.uint64)  # records in each bucket
        for start in range(0, count, self._bucket_rows):
            stop = min(start + self._bucket_rows, count)
            values = byte_view(read_range(self._rows, start, stop)).reshape(stop - start, -1)
            positions = self._order[start:stop].astype(np.int64)
            error = _core.scatter_rows(self._fd, values, positions, self._bucket_rows, count, filled)
            if error:
                raise OSError(error, os.strerror(error), os.fspath(self._path))
            unsynced_bytes += values.nbytes
            if unsynced_bytes >= _SYNC_BYTES:
                sync_files([self._fd])  # which frees the page cache
                unsynced_bytes = 0

    def read_into(self, start: int, out: torch.Tensor) -> None:
        target = byte_view(out).reshape(len(out), self._row_bytes)
        done = 0
        while done < len(out):
            number, at = divmod(start + done, self._bucket_rows)
            with self._lock:
                bucket = self._bucket(number)
            part = bucket[at : at + len(out) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def _bucket(self, number: int) -> np.ndarray:
        """The sorted rows of a bucket, uint8[rows, row_bytes]."""
        if number in self._buckets:
            return self._buckets[number]
        while len(self._buckets) >= _HELD:
            del self._buckets[min(self._buckets)]
        first = number * self._bucket_rows
        count = min(self._bucket_rows, self.shape[0] - first)
        records = np.empty((count, self._record_bytes), np.uint8)
        offset = first * self._record_bytes
        read_exactly(self._fd, records.reshape(-1), offset, self._path)
        os.posix_fadvise(self._fd, offset, records.nbytes, os.POSIX_FADV_DONTNEED)
        bucket = np.empty((count, self._row_bytes), np.uint8)
        if not _core.place_rows(records, bucket):
            raise StorageError(0, "the scratch file of reordered rows is damaged; convert again", self._path)
        self._buckets[number] = bucket
        return bucket


def _bucket_rows_for(rows: Rows, memory_bytes: int) -> int:
    """The number of rows per bucket, so that scattering and sorting fit in memory_bytes."""
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize + _core.SLOT_BYTES
    # The position of a row takes 8 more bytes.
    return int(max(1, min(memory_bytes // _SHARE // (row_bytes + 8), rows.shape[0], (1 << 32) - 1)))


def bytes_needed(rows: Rows) -> int:
    """The size of the scratch file for the rows of a table."""
    return math.prod(rows.shape) * rows.dtype.itemsize + rows.shape[0] * _core.SLOT_BYTES


InEdges = tuple[np.ndarray, np.ndarray]
"""(indptr, indices): the sources of the in-edges of every node of one type, of the same type."""

MAX_ROWS = (1 << 32) - 1
COMMUNITY_BYTES = 20
"""Memory per row of an order by community."""

DEGREE_BYTES = 12
"""Memory per row of an order by degree."""

_COMMUNITY_ROWS = 4096  # maximum size of a community: its rows are near each other in any order
_LEAST_ROWS = 16  # rows of smaller communities come last, by weight
_ROUNDS = 12
_SETTLED = 100  # stop when fewer than one row in this many moves


def degree_order(weights: np.ndarray) -> np.ndarray:
    """Positions by decreasing weight (such as the out-degree), then by id. weights: uint32[row_count]."""
    nodes = np.empty(len(weights), np.uint32)
    _core.by_weight(np.ascontiguousarray(weights, np.uint32), nodes)
    order = np.empty(len(weights), position_dtype(len(weights)))
    for start in range(0, len(nodes), MARK_ROWS):
        part = nodes[start : start + MARK_ROWS]
        order[part] = np.arange(start, start + len(part), dtype=order.dtype)
    return order


def community_order(graphs: Sequence[InEdges], weights: np.ndarray) -> np.ndarray:
    """Positions by community, the largest first, and by decreasing weight in each.

    graphs: in-edges between the rows, one relation each. weights: uint32[row_count]. Finds communities by
    label propagation with bounded sizes (Raghavan et al. 2007; Meyerhenke et al. 2014, section III), in at
    most 12 passes over all edges. Deterministic. Raises ValueError for a damaged topology.
    """
    count = len(weights)
    labels, sizes = find_communities(graphs, count, _COMMUNITY_ROWS)
    # The size of each label becomes the rank of its community. Small communities share the last rank.
    large = np.flatnonzero(sizes >= _LEAST_ROWS)
    large = large[np.argsort(-sizes[large].astype(np.int64), kind="stable")]
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes[large], dtype=np.uint64)])
    sizes[:] = len(large)
    sizes[large] = np.arange(len(large), dtype=np.uint32)
    nodes = np.empty(count, np.uint32)
    _core.by_weight(np.ascontiguousarray(weights, np.uint32), nodes)
    order = np.empty(count, position_dtype(count))
    _core.place_in_clusters(nodes, labels, sizes, starts, order)
    return order


def find_communities(
    graphs: Sequence[InEdges], row_count: int, most_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """(the label of each row, the number of rows with each label): uint32[row_count] each.

    Rows with one label are a community of at most most_rows rows. Raises ValueError for a damaged topology.
    """
    labels, sizes = np.arange(row_count, dtype=np.uint32), np.ones(row_count, np.uint32)
    for round_number in range(_ROUNDS):
        moved = sum(
            _core.propagate_labels(indptr, indices, labels, sizes, most_rows, round_number)
            for indptr, indices in graphs
        )
        if moved * _SETTLED < row_count:
            break
    for indptr, indices in graphs:
        _core.adopt_lone(indptr, indices, labels, sizes, most_rows)
    return labels, sizes


def check_memory(method: str, row_count: int, memory_bytes: int) -> None:
    """Raise FormatError, with the bytes needed, if an order of row_count rows does not fit in memory."""
    row_bytes = DEGREE_BYTES if method == "degree" else COMMUNITY_BYTES
    check_rows_fit(f"--order {method}", row_count, row_bytes, memory_bytes, "--order original")


def check_rows_fit(option: str, row_count: int, row_bytes: int, memory_bytes: int, cure: str) -> None:
    """Raise FormatError if an option needs more memory than there is, or has too many rows."""
    if row_count > MAX_ROWS:
        raise FormatError(f"{option} supports at most {MAX_ROWS} rows, not {row_count}")
    if (needed := row_count * row_bytes) > memory_bytes:
        raise FormatError(
            f"{option} of {row_count} rows needs {needed} bytes, but --memory is {memory_bytes}: "
            f"give --memory {needed // 1_000_000 + 1}MB, or {cure}"
        )


def as_positions(order: np.ndarray | torch.Tensor, row_count: int, what: str) -> np.ndarray:
    """Convert an order to its stored type. Raises FormatError unless it is int[row_count]."""
    values = order.numpy() if isinstance(order, torch.Tensor) else np.asarray(order)
    if values.shape != (row_count,) or values.dtype.kind not in "iu":
        raise FormatError(
            f"the order of {what} is {values.dtype}{list(values.shape)}; it must be int[{row_count}]"
        )
    return values.astype(position_dtype(row_count), copy=False)
