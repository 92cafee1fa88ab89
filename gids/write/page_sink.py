"""PageSink: the files of one table, filled by ranges of rows. Called by all that write tables.

A table is written by `write(start, rows)`: by write_rows, which reads a source in several threads, by
TableWriter, and, one sink per part, by `gids partition`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from gids import _core
from gids.closing import Closing
from gids.store.geometry import div_ceil
from gids.store.manifest import TableEntry
from gids.store.rows import Rows, file_crc32c, in_order, read_exactly
from gids.stored_file import opened
from gids.write.files import aligned_zeros, open_sized, sync_files, write_directly, write_exactly
from gids.write.narrow import cast_exactly

MAX_BLOCK_BYTES = 8 << 20


def table_files(root: Path, entry: TableEntry) -> dict[Path, int]:
    """The shards of a table, then its checksums, with their sizes. root: the dataset's directory."""
    layout = entry.geometry
    files = {root / shard: layout.shard_bytes(i) for i, shard in enumerate(entry.shards)}
    return files | {root / entry.checksums.path: 4 * layout.page_count}


class PageSink(Closing):
    """The shards and checksums of one table. Use as a context manager, which closes the files.

    Takes rows in any order, each once; several threads may write. Memory: every page of which rows are
    missing, and up to 8 MiB for each thread that writes, where rows must be copied: to pad pages, to separate
    the pages of several shards, or to align them for direct writes.

    root: the dataset's directory. entry: the table's. The content of existing files is kept. direct: write
    without the page cache where the file system can. sync_bytes: bytes between syncs. on_sync(n): called, by
    one thread at a time, when the first n rows are on disk. buffers: a place for those of the threads, which
    sinks of equal rows and pages share. Raises OSError. Attributes: layout; shards; fds (of these).
    """

    def __init__(
        self,
        root: Path,
        entry: TableEntry,
        *,
        direct: bool = True,
        sync_bytes: int = sys.maxsize,
        on_sync: Callable[[int], None] = lambda _: None,
        buffers: threading.local | None = None,
    ) -> None:
        self.layout, self._direct = entry.geometry, direct
        files = table_files(root, entry)
        *self.shards, self._checksums = files
        self._sync_bytes, self._on_sync = sync_bytes, on_sync
        self._block_pages = max(1, MAX_BLOCK_BYTES // self.layout.page_bytes)
        self._buffers = buffers or threading.local()
        self._syncing = threading.Lock()
        self._lock = threading.Lock()  # protects the next four
        self._begun, self._written = RowRanges(), RowRanges()
        self._partial: dict[int, tuple[np.ndarray, int]] = {}  # page -> (bytes, missing rows)
        self._unsynced_bytes = 0
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._open.close)
            *self.fds, self._sums_fd = [open_sized(self._open, *file) for file in files.items()]
            on_error.pop_all()
        for fd in self.fds if direct else ():
            write_directly(fd)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write rows start, start + 1, …, as they are stored: uint8[n, row_bytes], C order.

        Raises ValueError for a row that was written before, OSError.
        """
        per_page, stop = self.layout.rows_per_page, start + len(rows)
        if start == stop:
            return
        with self._lock:
            self._begun.add(start, stop)
        at = start
        while at < stop:
            page, slot = divmod(at, per_page)
            if slot or stop - at < per_page:
                end = min(stop, (page + 1) * per_page)
                self._add(page, slot, rows[at - start : end - start])
            else:
                count = min((stop - at) // per_page, self._block_pages)
                end = at + count * per_page
                self.store(page, rows[at - start : end - start].reshape(count, -1))
            at = end
        with self._lock:
            self._written.add(start, stop)
            is_due = self._unsynced_bytes >= self._sync_bytes
            if is_due:
                self._unsynced_bytes = 0
        if is_due:
            self.sync()

    def store(self, first: int, pages: np.ndarray) -> None:
        """Write pages first, first + 1, … and their checksums. pages: uint8[n, bytes], zeros may follow."""
        layout, count = self.layout, self.layout.shard_count
        sums = np.empty(len(pages), np.uint32)
        for index in range(min(count, len(pages))):
            shard, offset = layout.page_location(first + index)
            padded = self._padded(pages[index::count])
            sums[index::count] = _core.crc32c(padded)
            write_exactly(self.fds[shard], padded.reshape(-1), offset)
        write_exactly(self._sums_fd, sums.view(np.uint8), first * 4)
        with self._lock:
            self._unsynced_bytes += len(pages) * layout.page_bytes

    def flush(self) -> None:
        """Write the pages of which rows are missing, with zeros there. No thread may write meanwhile."""
        for page, (content, _) in self._partial.items():
            self.store(page, content[None])

    def resume(self, rows: int) -> None:
        """Take the first rows, which another sink wrote, flushed and synced, as written."""
        if not rows:
            return
        self._begun.add(0, rows)
        self._written.add(0, rows)
        page, slot = divmod(rows, self.layout.rows_per_page)
        if slot and rows < self.layout.row_count:
            content = np.empty(self.layout.page_bytes, np.uint8)
            shard, offset = self.layout.page_location(page)
            with opened(self.shards[shard]) as fd:
                read_exactly(fd, content, offset, self.shards[shard])
            self._partial[page] = content, self._rows_of(page) - slot

    def sync(self) -> None:
        """Put all that is written on disk, except for pages of which rows are missing. Raises OSError."""
        with self._syncing:
            with self._lock:
                rows = self._written.end
                if (page := rows // self.layout.rows_per_page) in self._partial:
                    rows = page * self.layout.rows_per_page
            sync_files((*self.fds, self._sums_fd))
            self._on_sync(rows)

    def finish(self) -> int:
        """Call sync() and return the CRC32C of the checksums."""
        self.sync()
        return file_crc32c(self._checksums)

    def first_gap(self) -> tuple[int, int] | None:
        """The first and last row of the first rows that were never written, or None."""
        with self._lock:
            return self._begun.first_gap(self.layout.row_count)

    @property
    def is_writing(self) -> bool:
        """Whether a thread is writing, or an error ended a write."""
        with self._lock:
            return self._written != self._begun

    def close(self) -> None:
        self._open.close()

    def _rows_of(self, page: int) -> int:
        per_page = self.layout.rows_per_page
        return min(per_page, self.layout.row_count - page * per_page)

    def _add(self, page: int, slot: int, rows: np.ndarray) -> None:
        """Add rows of one page; write the page when it is complete."""
        layout = self.layout
        with self._lock:
            content, missing = self._partial.get(page) or (
                np.zeros(layout.page_bytes, np.uint8),
                self._rows_of(page),
            )
            content[slot * layout.row_bytes :][: rows.size] = rows.reshape(-1)
            missing -= len(rows)
            self._partial[page] = content, missing
            if missing:
                return
            del self._partial[page]
        self.store(page, content[None])

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
    first_row: int,
    *,
    source_row_bytes: int,
    workers: int,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write all rows from first_row on, the first of a page. Several threads read, cast and write.

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
        for _ in in_order(pool, work, range(first_row, layout.row_count, block_rows), 2 * workers):
            pass


def _typed(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data.reshape(-1)).view(dtype).view(shape)


@dataclass
class RowRanges:
    """Disjoint ranges of rows, ascending. Neighbors are merged, so memory grows with the number of gaps."""

    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        """Add rows start … stop (stop > start). Raises ValueError if one was added before."""
        at = bisect_right(self.starts, start)
        clashes = at > 0 and self.stops[at - 1] > start
        if clashes or (at < len(self.starts) and self.starts[at] < stop):
            first = start if clashes else self.starts[at]
            raise ValueError(
                f"row {first} was written already (this block has {start} to {stop - 1}): write each row once"
            )
        if at < len(self.starts) and self.starts[at] == stop:
            stop = self.stops[at]
            del self.starts[at], self.stops[at]
        if at > 0 and self.stops[at - 1] == start:
            self.stops[at - 1] = stop
        else:
            self.starts.insert(at, start)
            self.stops.insert(at, stop)

    @property
    def end(self) -> int:
        """The number of rows from the first on without a gap."""
        return self.stops[0] if self.starts[:1] == [0] else 0

    def first_gap(self, row_count: int) -> tuple[int, int] | None:
        """The first and last row of the first gap before row_count, or None."""
        after = self.end
        if after >= row_count:
            return None
        rest = [start for start in self.starts[:2] if start >= after]
        return after, (rest[0] if rest else row_count) - 1
