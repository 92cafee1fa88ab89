"""Reads the pages of a table from the first to the last, without the memory map and the page cache. Called by
Table.scan, `verify`, restripe and `gids partition`.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from gids import _core
from gids.closing import Closing
from gids.errors import StorageError
from gids.store.geometry import Geometry, div_ceil
from gids.store.rows import read_exactly
from gids.stored_file import AnyFile, open_descriptor

Item = TypeVar("Item")
Result = TypeVar("Result")


class PageReader(Closing):
    """The open shards of a table. Use as a context manager, which closes them. Any thread may read.

    sums: the checksums of all pages, uint32[page_count]; None: they are not compared. name: of the table, for
    errors.
    """

    def __init__(
        self, layout: Geometry, shards: Sequence[AnyFile], sums: np.ndarray | None = None, name: str = ""
    ) -> None:
        self.layout, self._shards, self._sums, self._name = layout, shards, sums, name
        self._fds: list[int] = []
        self._open = ExitStack()
        with ExitStack() as on_error:
            on_error.callback(self._open.close)
            for shard in shards:
                self._fds.append(open_descriptor(shard))
                self._open.callback(os.close, self._fds[-1])
            on_error.pop_all()

    def close(self) -> None:
        self._open.close()

    def rows(self, start: int, count: int) -> np.ndarray:
        """Rows start … start + count, or to the end, as they are stored: uint8[n, row_bytes]. See pages."""
        layout = self.layout
        count = min(count, layout.row_count - start)
        first, last = start // layout.rows_per_page, div_ceil(start + count, layout.rows_per_page)
        pages = self.pages(first, last - first)
        rows = pages[:, : layout.rows_per_page * layout.row_bytes].reshape(-1, layout.row_bytes)
        skipped = start - first * layout.rows_per_page
        return rows[skipped : skipped + count]

    def pages(self, first: int, count: int) -> np.ndarray:
        """Pages first … first + count, or to the end: uint8[n, page_bytes], with one read per shard.

        Raises StorageError for a page that cannot be read or has another checksum.
        """
        count = min(count, self.layout.page_count - first)
        pages = np.empty((count, self.layout.page_bytes), np.uint8)
        for shard, fd in enumerate(self._fds):
            skipped = (shard - first) % len(self._fds)
            mine = pages[skipped :: len(self._fds)]
            if not len(mine):
                continue
            _, offset = self.layout.page_location(first + skipped)
            # The pages of one of several shards are read together, then copied to their positions.
            extent = mine if len(self._fds) == 1 else np.empty(mine.shape, np.uint8)
            read_exactly(fd, extent.reshape(-1), offset, self._shards[shard])
            os.posix_fadvise(fd, offset, extent.size, os.POSIX_FADV_DONTNEED)
            if extent is not mine:
                mine[:] = extent
        if self._sums is not None:
            wrong = np.flatnonzero(_core.crc32c(pages) != self._sums[first : first + count])
            if len(wrong):
                shard, offset = self.layout.page_location(first + int(wrong[0]))
                what = f"page {first + wrong[0]} of {self._name!r} fails its CRC32C: see `gids verify`"
                raise StorageError(errno.EBADMSG, what, self._shards[shard], int(offset))
        return pages


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[Result]:
    """Yield work(item) of each item, in order. At most at_once items are in the pool, or done and not taken.

    An error of an item is raised in its turn, and ends the others that have not begun.
    """
    running: deque[Future[Result]] = deque()
    try:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= at_once:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def read_ahead(read: Callable[[int], Result], starts: Sequence[int]) -> Iterator[tuple[int, Result]]:
    """Yield (start, read(start)) of all starts, in order. The next block is read while one is used."""
    with ThreadPoolExecutor(1, "gids-scan") as pool:
        yield from zip(starts, in_order(pool, read, starts, 2), strict=True)
