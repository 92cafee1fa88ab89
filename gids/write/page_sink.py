"""PageSink: the files of one table, filled with rows. Called by all that write tables.

write_rows, which reads a source in several threads, writes ranges of whole pages. TableWriter appends rows,
and so does `gids partition`, which has one sink per part.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.closing import Closing
from gids.store.geometry import div_ceil
from gids.store.manifest import TableEntry
from gids.store.rows import Rows, file_crc32c, in_order
from gids.write.files import aligned_zeros, open_sized, sync_files, write_directly, write_exactly
from gids.write.narrow import cast_exactly

MAX_BLOCK_BYTES = 8 << 20


class PageSink(Closing):
    """The shards and checksums of one table. Use as a context manager, which closes the files.

    Memory: the incomplete page of append(), and up to 8 MiB for each thread that writes, where rows must be
    copied: to pad pages, to separate the pages of several shards, or to align them for direct writes.

    root: the dataset's directory. entry: the table's. direct: write without the page cache where the file
    system can. buffers: a place for those of the threads, which sinks of equal rows and pages share. Raises
    OSError. Attributes: layout; next_row (that append() writes).
    """

    def __init__(
        self, root: Path, entry: TableEntry, *, direct: bool = True, buffers: threading.local | None = None
    ) -> None:
        self.layout, self._direct = entry.geometry, direct
        self._checksums = root / entry.checksums.path
        self._block_pages = max(1, MAX_BLOCK_BYTES // self.layout.page_bytes)
        self._buffers = buffers or threading.local()
        self.next_row = 0
        self._incomplete = np.zeros(self.layout.page_bytes, np.uint8)  # the page of the next row
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._open.close)
            self._fds = [
                open_sized(self._open, root / shard, self.layout.shard_bytes(i))
                for i, shard in enumerate(entry.shards)
            ]
            self._sums_fd = open_sized(self._open, self._checksums, 4 * self.layout.page_count)
            on_error.pop_all()
        for fd in self._fds if direct else ():
            write_directly(fd)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write rows start, start + 1, …, as they are stored: uint8[n, row_bytes], C order. Any thread.

        They begin with a page, and end with one or with the table. Raises OSError.
        """
        per_page, stop = self.layout.rows_per_page, start + len(rows)
        assert start % per_page == 0, "rows that begin in a page are appended"
        for at in range(start, stop, self._block_pages * per_page):
            end = min(at + self._block_pages * per_page, stop)
            whole = (end - at) // per_page
            if whole:
                pages = rows[at - start : at - start + whole * per_page]
                self._store(at // per_page, pages.reshape(whole, -1))
            if at + whole * per_page < end:
                assert end == self.layout.row_count, "only the last page is not full"
                last = np.zeros((1, self.layout.page_bytes), np.uint8)
                rest = rows[at - start + whole * per_page :]
                last[0, : rest.size] = rest.reshape(-1)
                self._store(at // per_page + whole, last)

    def append(self, rows: np.ndarray) -> None:
        """Write the next rows, as they are stored. One thread at a time. Raises OSError."""
        layout, done = self.layout, 0
        while done < len(rows):
            page, slot = divmod(self.next_row, layout.rows_per_page)
            count = min(layout.rows_per_page - slot, len(rows) - done)
            if slot == 0 and count == layout.rows_per_page:
                count = (len(rows) - done) // layout.rows_per_page * layout.rows_per_page
                self.write(self.next_row, rows[done : done + count])
            else:
                part = rows[done : done + count].reshape(-1)
                self._incomplete[slot * layout.row_bytes :][: part.size] = part
                if slot + count == layout.rows_per_page or self.next_row + count == layout.row_count:
                    self._store(page, self._incomplete[None])
                    self._incomplete[:] = 0
            self.next_row += count
            done += count

    def finish(self) -> int:
        """Put all on disk and return the CRC32C of the checksums. Raises OSError."""
        sync_files((*self._fds, self._sums_fd))
        return file_crc32c(self._checksums)

    def close(self) -> None:
        self._open.close()

    def _store(self, first: int, pages: np.ndarray) -> None:
        """Write pages first, first + 1, … and their checksums. pages: uint8[n, bytes], zeros may follow."""
        layout, count = self.layout, self.layout.shard_count
        sums = np.empty(len(pages), np.uint32)
        for index in range(min(count, len(pages))):
            shard, offset = layout.page_location(first + index)
            padded = self._padded(pages[index::count])
            sums[index::count] = _core.crc32c(padded)
            write_exactly(self._fds[shard], padded.reshape(-1), offset)
        write_exactly(self._sums_fd, sums.view(np.uint8), first * 4)

    def _padded(self, pages: np.ndarray) -> np.ndarray:
        """The whole pages, uint8[n, page_bytes]: the same memory if it can be written, else a copy."""
        is_aligned = not self._direct or pages.ctypes.data % mmap.PAGESIZE == 0
        if pages.shape[1] == self.layout.page_bytes and pages.flags.c_contiguous and is_aligned:
            return pages
        buffer = getattr(self._buffers, "pages", None)
        if buffer is None or len(buffer) < len(pages):
            buffer = self._buffers.pages = aligned_zeros(len(pages), self.layout.page_bytes)
        copy: np.ndarray = buffer[: len(pages)]
        copy[:, : pages.shape[1]] = pages
        return copy


def write_rows(
    rows: Rows,
    dtype: torch.dtype,
    sink: PageSink,
    *,
    source_row_bytes: int,
    workers: int,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write all rows. Several threads read, cast and write.

    dtype: of the table's values. source_row_bytes: bytes of a row in the source, which takes memory while it
    is converted. on_bytes(n): progress in bytes of pages, from any thread. Raises the errors of the threads.
    """
    layout, per_page = sink.layout, sink.layout.rows_per_page
    # Memory of a thread per page: the page, a copy for a shard, its rows as read and as cast.
    source_bytes = per_page * source_row_bytes
    held_bytes = 2 * layout.page_bytes + source_bytes + per_page * layout.row_bytes
    most = min(MAX_BLOCK_BYTES // max(layout.page_bytes, source_bytes), memory_bytes // workers // held_bytes)
    block_rows, is_stored = max(1, most) * per_page, rows.dtype == dtype
    local = threading.local()

    def work(start: int) -> None:
        if not hasattr(local, "stored"):
            local.stored = aligned_zeros(block_rows, layout.row_bytes)
            width = math.prod(rows.shape[1:]) * rows.dtype.itemsize
            local.read = local.stored if is_stored else np.empty((block_rows, width), np.uint8)
        count = min(block_rows, layout.row_count - start)
        shape = (count, *rows.shape[1:])
        values = _typed(local.read[:count], rows.dtype, shape)
        rows.read_into(start, values)
        if not is_stored:
            cast_exactly(values, _typed(local.stored[:count], dtype, shape))
        sink.write(start, local.stored[:count])
        on_bytes(div_ceil(count, per_page) * layout.page_bytes)

    with ThreadPoolExecutor(workers, "gids-convert") as pool:
        for _ in in_order(pool, work, range(0, layout.row_count, block_rows), 2 * workers):
            pass


def _typed(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data.reshape(-1)).view(dtype).view(shape)
