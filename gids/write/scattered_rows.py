"""Rows in another order, from a source that is read once, from front to back. Called by DatasetWriter.

Two passes, both in long pieces: first, every row is written to the bucket of its position in a scratch file.
Then one bucket at a time is sorted in memory, when the writer of the table reads it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import StorageError
from gids.store.dtypes import byte_view
from gids.store.geometry import div_ceil
from gids.store.rows import Rows, read_exactly, read_range
from gids.write.files import sync_files

_SHARE = 6  # a bucket takes 1/6 of memory: two are held sorted, one as read
_HELD = 2  # sorted buckets: threads that read neighboring rows may need two


class ScatteredRows:
    """The rows of a source in the order of their positions, after scatter() has run.

    order: positions, int32 or int64[row_count]. path: the scratch file, of `bytes_needed`; made here, removed
    by the caller. bucket_rows: as in the unfinished file, or from `bucket_rows_for`.
    """

    def __init__(self, rows: Rows, order: np.ndarray, path: Path, bucket_rows: int) -> None:
        self.shape, self.dtype = rows.shape, rows.dtype
        self._rows, self._order, self._path = rows, order, path
        self._row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
        self._record_bytes = self._row_bytes + _core.SLOT_BYTES
        self._bucket_rows = bucket_rows
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, bytes_needed(rows))
        self._lock = threading.Lock()
        self._buckets: dict[int, np.ndarray] = {}

    def scatter(self, first_row: int, on_sync: Callable[[int], None], sync_bytes: int) -> None:
        """Write all rows from first_row on. on_sync(n): called when the first n rows are on disk."""
        count = self.shape[0]
        filled = self._filled(first_row)
        unsynced = 0
        for start in range(first_row, count, self._bucket_rows):
            stop = min(start + self._bucket_rows, count)
            values = byte_view(read_range(self._rows, start, stop)).reshape(stop - start, -1)
            positions = self._order[start:stop].astype(np.int64)
            error = _core.scatter_rows(self._fd, values, positions, self._bucket_rows, count, filled)
            if error:
                raise OSError(error, os.strerror(error), os.fspath(self._path))
            unsynced += values.nbytes
            if unsynced >= sync_bytes or stop == count:
                sync_files([self._fd])
                on_sync(stop)
                unsynced = 0

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

    def _filled(self, first_row: int) -> np.ndarray:
        """The number of records in each bucket after the rows before first_row are written."""
        filled = np.zeros(div_ceil(self.shape[0], self._bucket_rows), np.int64)
        for start in range(0, first_row, self._bucket_rows):
            part = self._order[start : min(start + self._bucket_rows, first_row)]
            filled += np.bincount(part // self._bucket_rows, minlength=len(filled))
        return filled.view(np.uint64)

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


def bucket_rows_for(rows: Rows, memory_bytes: int) -> int:
    """The number of rows per bucket, so that scattering and sorting fit in memory_bytes."""
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize + _core.SLOT_BYTES
    # The position of a row takes 8 more bytes.
    return int(max(1, min(memory_bytes // _SHARE // (row_bytes + 8), rows.shape[0], (1 << 32) - 1)))


def bytes_needed(rows: Rows) -> int:
    """The size of the scratch file for the rows of a table."""
    return math.prod(rows.shape) * rows.dtype.itemsize + rows.shape[0] * _core.SLOT_BYTES
