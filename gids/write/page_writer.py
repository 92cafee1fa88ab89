"""Writes the pages of one table: reads rows, casts, pads, checksums and writes them, in several threads.

Called by DatasetWriter. Memory: a few blocks per worker. Every `sync_bytes`, written pages are synced,
reported and dropped from the page cache.

Writes are direct if the file system supports them: without a copy, and without the page cache. Memory, offset
and size of a direct write must be multiples of the disk's block size. If they are not, or direct writes fail,
the file is written through the page cache from then on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.errors import FormatError
from gids.store.dtypes import equal_values
from gids.store.geometry import Geometry, div_ceil
from gids.store.rows import Rows
from gids.write.sync import sync_files

MAX_BLOCK_BYTES = 8 << 20
_COMPARED_VALUES = 1 << 17  # at a time after a cast, so that temporaries are small
_WIDER = {"int16": torch.int32, "uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}
"""For whole numbers of types that tables cannot have."""


class PageWriter:
    """Writes one table.

    shard_fds, checksum_fd: files open for writing, with their final size. source_row_bytes: bytes of a row in
    the source, which takes memory while it is converted. on_sync(n): called, by one thread at a time, when
    the first n pages are on disk. on_bytes(n): progress, from any thread.
    """

    def __init__(
        self,
        rows: Rows,
        dtype: torch.dtype,
        layout: Geometry,
        shard_fds: Sequence[int],
        checksum_fd: int,
        *,
        source_row_bytes: int,
        workers: int,
        memory_bytes: int,
        sync_bytes: int,
        on_sync: Callable[[int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._rows, self._dtype, self._layout = rows, dtype, layout
        self._shard_fds, self._checksum_fd = shard_fds, checksum_fd
        self._workers = workers
        self._on_sync, self._on_bytes = on_sync, on_bytes
        # Memory of a worker per page: the page, its copy for a shard, its rows as read and as cast.
        source_bytes = layout.rows_per_page * source_row_bytes
        held_bytes = 2 * layout.page_bytes + source_bytes + layout.rows_per_page * layout.row_bytes
        most = min(
            MAX_BLOCK_BYTES // max(layout.page_bytes, source_bytes), memory_bytes // workers // held_bytes
        )
        self._block_pages = max(1, most)
        self._sync_pages = max(1, sync_bytes // layout.page_bytes)
        self._lock = threading.Lock()
        self._next = self._written = self._synced = 0
        self._finished: set[int] = set()  # first pages of blocks that finished out of order
        self._syncing = threading.Lock()
        self._stop = False

    def write(self, first_page: int) -> None:
        """Write and sync all pages from first_page on. Raises the errors of the workers."""
        self._next = self._written = self._synced = first_page
        for fd in self._shard_fds:
            write_directly(fd)
        with ThreadPoolExecutor(self._workers, "gids-convert") as pool:
            futures = [pool.submit(self._work) for _ in range(self._workers)]
            try:
                for future in futures:
                    future.result()
            finally:
                self._stop = True  # stops the others after an error or Ctrl-C
        self._sync()

    def _work(self) -> None:
        try:
            layout = self._layout
            pages = aligned_zeros(self._block_pages, layout.page_bytes)
            shards = layout.shard_count
            stripe = aligned_zeros(div_ceil(len(pages), shards), pages.shape[1]) if shards > 1 else None
            # If pages are exactly the bytes of rows, rows are read directly into them.
            used = layout.rows_per_page * layout.row_bytes
            is_plain = self._rows.dtype == self._dtype and used == layout.page_bytes
            block_rows = self._block_pages * layout.rows_per_page
            scratch = None if is_plain else _Scratch(block_rows, self._rows, self._dtype)
            while not self._stop:
                with self._lock:
                    first = self._next
                    self._next += self._block_pages
                count = min(self._block_pages, layout.page_count - first)
                if count <= 0:
                    return
                block = pages[:count]
                self._fill(first, block, scratch)
                store_pages(layout, first, block, self._shard_fds, self._checksum_fd, stripe)
                self._on_bytes(block.nbytes)
                self._advance(first, count)
        except BaseException:
            self._stop = True
            raise

    def _fill(self, first: int, pages: np.ndarray, scratch: _Scratch | None) -> None:
        layout = self._layout
        start = first * layout.rows_per_page
        count = min(len(pages) * layout.rows_per_page, layout.row_count - start)
        if count < len(pages) * layout.rows_per_page:
            pages[-1] = 0  # the last page is not full
        if scratch is None:
            data = pages.reshape(-1)[: count * layout.row_bytes]
            self._rows.read_into(start, _typed(data, self._dtype, (count, *self._rows.shape[1:])))
            return
        data = scratch.load(self._rows, start, count)
        whole, rest = divmod(count, layout.rows_per_page)
        used = layout.rows_per_page * layout.row_bytes
        pages[:whole, :used] = data[: whole * used].reshape(whole, used)
        pages[whole : whole + 1, : rest * layout.row_bytes] = data[whole * used :]

    def _advance(self, first: int, count: int) -> None:
        with self._lock:
            self._finished.add(first)
            while self._written in self._finished:
                self._finished.remove(self._written)
                self._written = min(self._written + self._block_pages, self._layout.page_count)
            due = self._written - self._synced >= self._sync_pages
        if due and self._syncing.acquire(blocking=False):
            try:
                self._sync()
            finally:
                self._syncing.release()

    def _sync(self) -> None:
        with self._lock:
            written = self._written
        sync_files((*self._shard_fds, self._checksum_fd))
        self._on_sync(written)
        self._synced = written


class _Scratch:
    """Buffers of one worker for rows as read and, if the table has another type, as cast."""

    def __init__(self, row_count: int, rows: Rows, dtype: torch.dtype) -> None:
        elements = row_count * math.prod(rows.shape[1:])
        self._read = np.empty(elements * rows.dtype.itemsize, np.uint8)
        self._cast = None if rows.dtype == dtype else np.empty(elements * dtype.itemsize, np.uint8)
        self._dtype = dtype

    def load(self, rows: Rows, start: int, count: int) -> np.ndarray:
        """The bytes of rows start … start + count in the type of the table."""
        shape = (count, *rows.shape[1:])
        elements = math.prod(shape)
        data = self._read[: elements * rows.dtype.itemsize]
        values = _typed(data, rows.dtype, shape)
        rows.read_into(start, values)
        if self._cast is None:
            return data
        cast = self._cast[: elements * self._dtype.itemsize]
        cast_exactly(values, _typed(cast, self._dtype, shape))
        return cast


def store_pages(
    layout: Geometry,
    first: int,
    pages: np.ndarray,
    shard_fds: Sequence[int],
    checksum_fd: int,
    stripe: np.ndarray | None = None,
) -> None:
    """Write pages first, first + 1, …, uint8[n, page_bytes], and their checksums. Raises OSError.

    stripe: uint8[m, page_bytes], a buffer for the pages of one of several shards; aligned for direct
    writes.
    """
    write_pages(layout, first, pages, shard_fds, stripe)
    write_exactly(checksum_fd, _core.crc32c(pages).view(np.uint8), first * 4)


def write_pages(
    layout: Geometry,
    first: int,
    pages: np.ndarray,
    shard_fds: Sequence[int],
    stripe: np.ndarray | None = None,
) -> None:
    """Like store_pages, without checksums."""
    for index in range(min(layout.shard_count, len(pages))):
        shard, offset = layout.page_location(first + index)
        mine = pages[index :: layout.shard_count]
        if stripe is not None:
            stripe[: len(mine)] = mine
            mine = stripe[: len(mine)]
        write_exactly(shard_fds[shard], np.ascontiguousarray(mine).reshape(-1), offset)


def open_sized(stack: contextlib.ExitStack, path: Path, size_bytes: int, flags: int = 0) -> int:
    """Open or make a file of this size, until the stack closes. Keeps existing content. flags: of os.open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    return fd


def cast_exactly(values: torch.Tensor, out: torch.Tensor) -> None:
    """Cast values into out. Raises FormatError if a fraction is lost or a whole number is another one in out.

    Does not check the rounding to a shorter floating type; narrow.py does.
    """
    if values.is_complex():
        raise FormatError(f"tables cannot hold {values.dtype}: store the real and imaginary parts as columns")
    if values.dtype.is_floating_point and not out.dtype.is_floating_point:
        cost = "round them to 0 and 1" if out.dtype == torch.bool else "cut their fractions"
        raise FormatError(
            f"casting {values.dtype} features to {out.dtype} would {cost}; "
            "int8 with a scale rounds them instead"
        )
    out.copy_(values)
    if values.dtype.is_floating_point:
        return
    flat_values, flat_out = values.reshape(-1), out.view(-1)
    for start in range(0, len(flat_out), _COMPARED_VALUES):
        piece = flat_values[start : start + _COMPARED_VALUES]
        lost = ~equal_values(piece, flat_out[start : start + _COMPARED_VALUES])
        if bool(lost.any()):
            number = int(piece[int(lost.to(torch.uint8).argmax())].item())
            cure = f"keep {_WIDER.get(str(values.dtype).removeprefix('torch.'), values.dtype)}"
            if number >= 1 << 63:
                cure = "tables hold whole numbers below 2^63"
            raise FormatError(f"{number} is not exact in {out.dtype}; {cure}")


def _typed(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def aligned_zeros(count: int, size_bytes: int) -> np.ndarray:
    """uint8[count, size_bytes] of zeros, C order, aligned to memory pages."""
    memory = mmap.mmap(-1, max(1, count * size_bytes))
    return np.frombuffer(memory, np.uint8, count * size_bytes).reshape(count, size_bytes)


def write_directly(fd: int) -> None:
    """Switch an open file to direct writes, if its file system supports them."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def write_exactly(fd: int, data: np.ndarray, offset: int) -> None:
    """Write all of uint8[bytes] at an offset. Any thread may call. Raises OSError."""
    view = memoryview(data.data)
    done, may_be_direct = 0, True
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not may_be_direct:
                raise
            may_be_direct = False  # another thread may do the same at the same time
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
