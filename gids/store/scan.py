"""Reads a table from the first row to the last, one block at a time, with read-ahead. Called by Table.scan.

Reads page-aligned extents of every shard, without the memory map, and drops them from the page cache. Memory:
two blocks. restripe uses `read_pages`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

from gids.store.geometry import Geometry, div_ceil
from gids.store.rows import read_exactly
from gids.stored_file import AnyFile, open_descriptor


def scan(
    layout: Geometry,
    shards: Sequence[AnyFile],
    decode: Callable[[np.ndarray], torch.Tensor],
    rows_per_block: int,
    starts: Sequence[int],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) of the blocks that begin at starts, in that order. Reads one block ahead.

    decode: turns bytes, uint8[n, row_bytes], a view of a buffer, into rows.
    """
    with ExitStack() as stack:
        fds = [open_file(stack, path) for path in shards]
        pool = stack.enter_context(ThreadPoolExecutor(1, "gids-scan"))

        def read(start: int) -> torch.Tensor:
            count = min(rows_per_block, layout.row_count - start)
            return decode(_read(layout, fds, shards, start, count))

        ahead = None
        for index, start in enumerate(starts):
            future = ahead or pool.submit(read, start)
            ahead = pool.submit(read, starts[index + 1]) if index + 1 < len(starts) else None
            yield start, future.result()


def open_file(stack: ExitStack, path: AnyFile) -> int:
    """Open a file for reading until the stack closes."""
    fd = open_descriptor(path)
    stack.callback(os.close, fd)
    return fd


def _read(
    layout: Geometry,
    fds: Sequence[int],
    shards: Sequence[AnyFile],
    start: int,
    count: int,
) -> np.ndarray:
    first, last = start // layout.rows_per_page, div_ceil(start + count, layout.rows_per_page)
    pages = read_pages(layout, fds, shards, first, last - first)
    rows = pages[:, : layout.rows_per_page * layout.row_bytes].reshape(-1, layout.row_bytes)
    skipped = start - first * layout.rows_per_page
    return rows[skipped : skipped + count]


def read_pages(
    layout: Geometry, fds: Sequence[int], shards: Sequence[AnyFile], first: int, count: int
) -> np.ndarray:
    """Read pages first … first + count, uint8[count, page_bytes], with one read per shard."""
    pages = np.empty((count, layout.page_bytes), np.uint8)
    for shard, fd in enumerate(fds):
        mine = pages[(shard - first) % len(fds) :: len(fds)]
        if not len(mine):
            continue
        page = first + (shard - first) % len(fds)
        _, offset = layout.page_location(page)
        # The pages of one of several shards are read together, then copied to their positions.
        extent = mine if len(fds) == 1 else np.empty(mine.shape, np.uint8)
        read_exactly(fd, extent.reshape(-1), offset, shards[shard])
        os.posix_fadvise(fd, offset, extent.size, os.POSIX_FADV_DONTNEED)
        if extent is not mine:
            mine[:] = extent
    return pages
