"""Rows in another order, from a source that is read once, front to back. Used by DatasetWriter.

Two passes, both in long pieces: every row goes to the bucket of its position in a scratch file, in the order
of the source; then a bucket at a time is put in order in memory, as the table's writer asks for it. No row is
read or written by itself.
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

_SHARE = 6  # of memory: a bucket. Two are held in order and one as read; before, rows and their records
_HELD = 2  # buckets in order: threads that ask for neighbouring rows may stand in two


class ScatteredRows:
    """A source's rows in the order of their positions, once scatter() has run.

    order: positions, int32 or int64[row_count]. path: of the scratch file, made here, `bytes_needed` long;
    the caller removes it. bucket_rows: of the unfinished file that is there, or those of `bucket_rows_for`.
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
        """Write all rows from first_row on; those before it are on disk. on_sync(rows): so many are now."""
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
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
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
        """Records that each bucket has once the rows before first_row are written."""
        filled = np.zeros(div_ceil(self.shape[0], self._bucket_rows), np.int64)
        for start in range(0, first_row, self._bucket_rows):
            part = self._order[start : min(start + self._bucket_rows, first_row)]
            filled += np.bincount(part // self._bucket_rows, minlength=len(filled))
        return filled.view(np.uint64)

    def _bucket(self, number: int) -> np.ndarray:
        """uint8[rows, row_bytes] of a bucket, in order."""
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
            raise StorageError(0, "rows that were put aside here are damaged; convert again", self._path)
        self._buckets[number] = bucket
        return bucket


def bucket_rows_for(rows: Rows, memory_bytes: int) -> int:
    """Rows of a bucket, so that scattering and ordering keep within memory_bytes."""
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize + _core.SLOT_BYTES
    # A row's position takes 8 bytes beside it.
    return int(max(1, min(memory_bytes // _SHARE // (row_bytes + 8), rows.shape[0], (1 << 32) - 1)))


def bytes_needed(rows: Rows) -> int:
    """Of scratch, for a table's rows."""
    return math.prod(rows.shape) * rows.dtype.itemsize + rows.shape[0] * _core.SLOT_BYTES
