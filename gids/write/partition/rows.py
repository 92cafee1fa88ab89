"""Divides the rows of a table: each part gets its rows, as they are stored, in the order of their ids.

Called by run.py. Reads the source once per group of parts, and checks the checksum of every page that it
reads. A source with an order of rows is checked first, then read through memory maps.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gids import _core
from gids.errors import StorageError
from gids.store.files import Locator, map_array, shard_files
from gids.store.geometry import Geometry, div_ceil
from gids.store.manifest import TableEntry
from gids.store.rows import read_exactly
from gids.store.scan import open_file, read_pages
from gids.store.table import Table
from gids.write.page_writer import MAX_BLOCK_BYTES, aligned_zeros, open_sized, store_pages, write_directly
from gids.write.partition.edge_blocks import by_part, edge_blocks
from gids.write.sync import sync_files

_BUFFER_BYTES = 64 << 10  # of a part, if memory allows
_ROW_BYTES = 40  # memory per row of a block, besides three copies of its bytes
FILES = 2
"""Open files per part."""

OwnersOf = Callable[[int, int], np.ndarray]
"""(first, last) -> the part of each row from first to last, uint8 or uint16."""


def parts_at_once(page_bytes: int, memory_bytes: int) -> int:
    """The number of parts that one pass over a table can write."""
    return max(1, memory_bytes // 2 // max(page_bytes, _BUFFER_BYTES))


class EdgeOwners:
    """The parts of the rows of an edge table, which are in the order of edge ids.

    A window of ids is held in memory, and found by one pass over the topology.
    """

    def __init__(
        self,
        indptr: np.ndarray,
        edge_ids: Callable[[int, int], np.ndarray] | None,
        owners: np.ndarray,
        count: int,
        memory_bytes: int,
    ) -> None:
        """edge_ids(first, last): the ids at positions; None: the positions. owners: of the destinations."""
        self._indptr, self._edge_ids, self._owners, self._count = indptr, edge_ids, owners, count
        self._window_ids = max(1, memory_bytes // 2 // owners.itemsize)
        self._block_edges = max(1, min(1 << 20, memory_bytes // 2 // 40))
        self._first = self._last = 0
        self._window = np.empty(0, owners.dtype)

    def __call__(self, first: int, last: int) -> np.ndarray:
        out = np.empty(last - first, self._owners.dtype)
        done = first
        while done < last:
            if not self._first <= done < self._last:
                self._find(done)
            end = min(last, self._last)
            out[done - first : end - first] = self._window[done - self._first : end - self._first]
            done = end
        return out

    def _find(self, first: int) -> None:
        self._first, self._last = first, min(first + self._window_ids, self._count)
        self._window = window = np.empty(self._last - first, self._owners.dtype)
        start = first if self._edge_ids is None else 0
        for begin, end, of in edge_blocks(self._indptr, self._owners, self._block_edges, start):
            if self._edge_ids is None:
                if begin >= self._last:
                    break
                window[begin - first : min(end, self._last) - first] = of[: self._last - begin]
            else:
                ids = self._edge_ids(begin, end)
                mine = (ids >= first) & (ids < self._last)
                window[ids[mine] - first] = of[mine]


def divide_rows(
    table: Table,
    entry: TableEntry,
    locate: Locator,
    owners_of: OwnersOf,
    written: Sequence[TableEntry],
    roots: Sequence[Path],
    parts: range,
    *,
    first_row: int,
    memory_bytes: int,
    workers: int,
    sync_bytes: int,
    on_sync: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> None:
    """Write the tables of these parts, from row first_row of the source on.

    written, roots: the tables and directories of all parts. on_sync(n): called when the first n rows of the
    source are on disk. on_bytes(n): progress, in bytes of the source. Raises StorageError for a damaged page.
    """
    block_rows = max(1, memory_bytes // 4 // (3 * table.row_bytes + _ROW_BYTES))
    buffer_bytes = min(MAX_BLOCK_BYTES, memory_bytes // 2 // len(parts))
    with contextlib.ExitStack() as stack:
        targets = [_PartRows(stack, written[part], roots[part], buffer_bytes) for part in parts]
        if first_row:
            done = np.zeros(len(parts), np.int64)
            for start in range(0, first_row, block_rows):
                _, ends = by_part(owners_of(start, min(start + block_rows, first_row)), parts)
                done += np.diff(ends)
            for target, count in zip(targets, done.tolist(), strict=True):
                target.resume(count)
        for target in targets:
            target.begin()
        on_bytes(first_row * table.row_bytes)
        source = _Source(stack, table, entry, locate, check=first_row == 0)
        reader = stack.enter_context(ThreadPoolExecutor(1, "gids-partition-read"))
        pool = stack.enter_context(ThreadPoolExecutor(workers, "gids-partition"))
        unsynced = 0
        for start, rows in _ahead(reader, source, first_row, block_rows):
            order, ends = by_part(owners_of(start, start + len(rows)), parts)

            def add(
                index: int, rows: np.ndarray = rows, order: np.ndarray = order, ends: np.ndarray = ends
            ) -> None:
                targets[index].append(rows[order[ends[index] : ends[index + 1]]])

            for _ in pool.map(add, range(len(parts))):
                pass
            on_bytes(rows.nbytes)
            unsynced += rows.nbytes
            if unsynced >= sync_bytes:
                for _ in pool.map(_PartRows.sync, targets):
                    pass
                on_sync(start + len(rows))
                unsynced = 0
        for _ in pool.map(_PartRows.finish, targets):
            pass


def _ahead(
    reader: ThreadPoolExecutor, source: _Source, first_row: int, block_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of the blocks of a source; the next one is read meanwhile."""
    starts = range(first_row, source.row_count, block_rows)
    ahead = reader.submit(source.read, first_row, block_rows) if len(starts) else None
    for start in starts:
        assert ahead is not None
        rows = ahead.result()
        if start + block_rows < source.row_count:
            ahead = reader.submit(source.read, start + block_rows, block_rows)
        yield start, rows


class _Source:
    """The rows of the source's table, as they are stored."""

    def __init__(
        self, stack: contextlib.ExitStack, table: Table, entry: TableEntry, locate: Locator, *, check: bool
    ) -> None:
        self.row_count = table.row_count
        self._table, self._layout = table, entry.geometry
        self._paths = shard_files(entry, locate)
        self._fds = [open_file(stack, path) for path in self._paths]
        self._sums = map_array(locate.array(entry.checksums), entry.checksums)
        if entry.order is not None and check:
            step = max(1, _BUFFER_BYTES // entry.page_bytes)
            for page in range(0, self._layout.page_count, step):
                self._pages(page, min(step, self._layout.page_count - page))

    def read(self, start: int, count: int) -> np.ndarray:
        """Rows start … start + count, or to the end: uint8[n, row_bytes]."""
        layout = self._layout
        count = min(count, self.row_count - start)
        if self._table.order is not None:
            return self._table.read_stored(np.arange(start, start + count))
        first, last = start // layout.rows_per_page, div_ceil(start + count, layout.rows_per_page)
        pages = self._pages(first, last - first)
        rows = pages[:, : layout.rows_per_page * layout.row_bytes].reshape(-1, layout.row_bytes)
        skipped = start - first * layout.rows_per_page
        return rows[skipped : skipped + count]

    def _pages(self, first: int, count: int) -> np.ndarray:
        pages = read_pages(self._layout, self._fds, self._paths, first, count)
        wrong = np.flatnonzero(_core.crc32c(pages) != self._sums[first : first + count])
        if len(wrong):
            shard, offset = self._layout.page_location(first + int(wrong[0]))
            what = f"page {first + wrong[0]} of {self._table.name!r} fails its CRC32C: see `gids verify`"
            raise StorageError(errno.EBADMSG, what, self._paths[shard], int(offset))
        return pages


class _PartRows:
    """Writes the rows of one part, which are appended in order of their ids."""

    def __init__(self, stack: contextlib.ExitStack, entry: TableEntry, root: Path, buffer_bytes: int) -> None:
        layout = self._layout = entry.geometry
        self._path = root / entry.shards[0]
        self._fd = open_sized(stack, self._path, layout.shard_bytes(0))
        self._sums_fd = open_sized(stack, root / entry.checksums.path, 4 * layout.page_count)
        pages = max(1, min(buffer_bytes // layout.page_bytes, layout.page_count))
        self._pages = aligned_zeros(pages, layout.page_bytes)
        self._first_page = 0  # of the buffer
        self._rows = 0  # in the buffer

    def resume(self, rows: int) -> None:
        """Go on after this many rows. Their pages are on disk, the last one too if it is not full."""
        layout = self._layout
        self._first_page, self._rows = divmod(rows, layout.rows_per_page)
        if self._rows:
            read_exactly(self._fd, self._pages[0], self._first_page * layout.page_bytes, self._path)

    def begin(self) -> None:
        write_directly(self._fd)

    def append(self, rows: np.ndarray) -> None:
        layout, capacity = self._layout, len(self._pages) * self._layout.rows_per_page
        done = 0
        while done < len(rows):
            count = min(len(rows) - done, capacity - self._rows)
            self._place(rows[done : done + count])
            done += count
            if self._rows == capacity:
                self._store()
                self._first_page += len(self._pages)
                self._rows = 0
        assert self._first_page * layout.rows_per_page + self._rows <= layout.row_count

    def _place(self, rows: np.ndarray) -> None:
        """Copy rows into the buffer, which has room for them."""
        layout = self._layout
        done = 0
        while done < len(rows):
            page, slot = divmod(self._rows, layout.rows_per_page)
            whole = (len(rows) - done) // layout.rows_per_page if slot == 0 else 0
            if whole:
                count = whole * layout.rows_per_page
                used = layout.rows_per_page * layout.row_bytes
                self._pages[page : page + whole, :used] = rows[done : done + count].reshape(whole, used)
            else:
                count = min(len(rows) - done, layout.rows_per_page - slot)
                begin = slot * layout.row_bytes
                self._pages[page, begin : begin + count * layout.row_bytes] = rows[
                    done : done + count
                ].reshape(-1)
            done += count
            self._rows += count

    def _store(self) -> None:
        """Write the pages of the buffer, with zeros after the last row."""
        layout = self._layout
        count = div_ceil(self._rows, layout.rows_per_page)
        if not count:
            return
        if rest := self._rows % layout.rows_per_page:
            self._pages[count - 1, rest * layout.row_bytes :] = 0
        store_pages(layout, self._first_page, self._pages[:count], [self._fd], self._sums_fd)

    def sync(self) -> None:
        """Put all rows so far on disk."""
        self._store()
        sync_files((self._fd, self._sums_fd))

    def finish(self) -> None:
        self.sync()
        rows = self._first_page * self._layout.rows_per_page + self._rows
        assert rows == self._layout.row_count, f"{self._path}: {rows} rows of {self._layout.row_count}"


def part_layout(entry: TableEntry, rows: int) -> Geometry:
    """The layout of a part's table: one shard, the same pages."""
    layout = entry.geometry
    return Geometry(rows, layout.row_bytes, layout.page_bytes, 1)


def files_limit(per_part: int) -> int:
    """The number of parts whose files may be open at once."""
    soft = os.sysconf("SC_OPEN_MAX")
    return max(1, min(64, (soft - 64) // (2 * per_part)))
