"""The annex of a table: pages in scratch, after those of its shards, with copies of rows that a cache misses.

A superbatch is planned from the rows that its minibatches use; a sweep over the table then writes the copies.
From then on, a minibatch that enters the cache with positions in the annex reads one run from front to back.
Knows rows and steps; knows nothing of minibatches, and does not read: the cache does.
"""

from __future__ import annotations

import errno
import math
import os
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.cache.feature_cache import read_error
from gids.errors import StorageError
from gids.packs.scratch import BLOCK, Scratch, ScratchFull
from gids.store import Table
from gids.store.geometry import align_up, div_ceil

if TYPE_CHECKING:
    from gids.io import Engine

Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

CHUNK_BYTES = 1 << 20
"""The sweep reads the table in pieces of this length."""
CHUNKS = 16
"""Pieces that the sweep has in memory."""
GROUP_BYTES = 256 << 10
"""Copies are sorted by death inside a write buffer. With buffers of 64 KiB, 300 MB of rows keep 401 MB of
pages alive; of 256 KiB, 327 MB; of 1 MiB, 311 MB."""
_GAP_BYTES = 16 << 10
_WRITERS = 8
_BUFFERS = 48
"""Write buffers beside one for each run."""
_USE_BYTES = 10
"""Scratch for each use of a row."""
_GROWTH = 16 << 20


class RowUses:
    """The rows of a table that each minibatch of a superbatch uses, in a scratch file.

    After Annex.plan(): the positions of these rows in the annex.
    """

    def __init__(self, table: Table, scratch: Scratch) -> None:
        self._file = scratch.open()
        fd = os.open(self._file.paths[0], os.O_RDWR | os.O_CLOEXEC)  # through the page cache
        try:
            self.native = _core.RowUses.create(fd, table.row_count)
        finally:
            os.close(fd)

    def append(self, rows: Rows) -> None:
        """Add the rows of the next minibatch: uint32[n], may repeat. Raises ScratchFull, OSError."""
        end = (self.native.uses + len(rows)) * _USE_BYTES
        if end > self._file.nbytes:
            self._file.reserve(align_up(end, _GROWTH))
        self.native.append(rows)

    def __len__(self) -> int:
        return len(self.native)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        self._file.close()


class Superbatch:
    """A superbatch in the annex. first_page: of the annex, where its runs begin."""

    def __init__(self, plan: _core.AnnexPlan, uses: RowUses, first_page: int, rows_per_page: int) -> None:
        self.plan, self.uses, self.first_page = plan, uses, first_page
        self._first_pages = plan.first_pages()
        self._deaths = plan.deaths()
        self._rows_per_page = rows_per_page

    def __len__(self) -> int:
        return len(self.uses)

    @property
    def pages(self) -> int:
        """Number of pages of all runs."""
        return int(self._first_pages[-1])

    def positions(self, step: int, annex_row: int) -> npt.NDArray[np.int64]:
        """The positions that minibatch `step` enters the cache with: int64[n], in the order of its rows.

        annex_row: the position of the annex's first row.
        """
        out = np.empty(self.uses.native.count(step), np.int64)
        self.uses.native.read_positions(step, annex_row + self.first_page * self._rows_per_page, out)
        return out

    def run(self, step: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """(first page in the annex, uint8: whether a later step uses each page too) of a step's run.

        For PageCache.expect(), before the step enters.
        """
        begin, end = int(self._first_pages[step]), int(self._first_pages[step + 1])
        return self.first_page + begin, (self._deaths[begin:end] > step).view(np.uint8)

    def dying(self, step: int) -> npt.NDArray[np.uint32]:
        """Pages, from first_page on, that no later step uses. For PageCache.forget(), after the step."""
        return self.plan.dying(step)


class Annex:
    """The annex of one table: nbytes of scratch, in which superbatches follow one another in a ring.

    Raises ScratchFull if there is no room, StorageError if a directory takes no file.

    Attributes: pages: its length. paths: of its files, for the engine, after the shards.
    """

    def __init__(self, table: Table, scratch: Scratch, nbytes: int) -> None:
        self._table, self._scratch = table, scratch
        self._block_pages = BLOCK // math.gcd(BLOCK, table.page_bytes)  # runs begin at blocks of direct I/O
        self.pages = nbytes // table.page_bytes // self._block_pages * self._block_pages
        self._file = scratch.open(nbytes)
        try:
            self._file.reserve(self.pages * table.page_bytes)
        except BaseException:
            self._file.close()
            raise
        striped = _core.SCRATCH_STRIPE_BYTES % table.page_bytes == 0
        self.paths = self._file.paths if striped else self._file.paths[:1]
        self._live: deque[tuple[int, int]] = deque()  # (first page, end) of superbatches, oldest first

    def plan(
        self,
        uses: RowUses,
        *,
        workers: _core.Workers,
        lines: int,
        ahead: int,
        capacity_rows: int | None = None,
        buffer_bytes: int = 1 << 62,
        first_file: int = 0,
    ) -> Superbatch:
        """Plan the copies, and find a place for them in the ring.

        lines: of the cache. ahead: minibatches that are read before they are due. capacity_rows: that an
        offline cache keeps from step to step (None: as many as the lines have room for). buffer_bytes: memory
        for write buffers. first_file: the engine's number of the table's first shard. Blocks. Raises
        ScratchFull if the ring has no room, OSError.
        """
        table = self._table
        layout = {
            "row_count": table.row_count,
            "row_bytes": table.row_bytes,
            "page_bytes": table.page_bytes,
            "rows_per_page": table.rows_per_page,
            "group_bytes": min(GROUP_BYTES, buffer_bytes // (len(uses) + _BUFFERS)),
            "chunk_bytes": max(CHUNK_BYTES, table.page_bytes),
        }
        if capacity_rows is None:
            capacity_rows = _core.annex_capacity(uses.native, workers, lines=lines, ahead=ahead, **layout)
        shards = {"shard_count": len(table.shard_paths), "first_file": first_file}
        plan = _core.plan_annex(uses.native, workers, capacity_rows=capacity_rows, **shards, **layout)
        pages = div_ceil(plan.nbytes, table.page_bytes)
        return Superbatch(plan, uses, self._place(pages), table.rows_per_page)

    def sweep(
        self,
        superbatch: Superbatch,
        engine: Engine,
        *,
        workers: _core.Workers,
        checksums: npt.NDArray[np.uint32] | None = None,
    ) -> _core.AnnexSweep:
        """Begin to write the copies. checksums: uint32[page_count] of the table, to compare with."""
        plan = superbatch.plan
        runs = int(np.count_nonzero(plan.missed()))
        writer = _core.PackWriter.create(
            self._file.fds[: len(self.paths)],
            threads=_WRITERS,
            buffers=runs + _BUFFERS,
            buffer_bytes=plan.group_bytes,
        )
        return _core.AnnexSweep(
            engine.native,
            writer,
            workers,
            plan,
            chunks=CHUNKS,
            gap_bytes=_GAP_BYTES,
            first_page=superbatch.first_page,
            checksums=checksums,
        )

    def finish(self, sweep: _core.AnnexSweep) -> dict[str, int | float]:
        """Wait for a sweep. Returns bytes_read, bytes_written, busy_s. Raises StorageError, ScratchFull."""
        result = sweep.wait()
        code, file, offset = result["error"], result["file"], result["offset"]
        if code and result["in_table"]:
            raise read_error(code, self._table.shard_paths[file % len(self._table.shard_paths)], offset)
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise ScratchFull(code, "no room for scratch", self._scratch.directories[file])
        if code:
            directory = self._scratch.directories[file if result["in_annex"] else 0]
            raise StorageError(code, f"cannot write the annex: {os.strerror(code)}", directory)
        return {name: result[name] for name in ("bytes_read", "bytes_written", "busy_s")}

    def release(self) -> None:
        """Free the oldest superbatch's place. The cache must have forgotten its pages."""
        self._live.popleft()

    def close(self) -> None:
        """Give the scratch back. Idempotent. No read may be in flight."""
        self._file.close()

    def _place(self, pages: int) -> int:
        """Where so many pages fit: after the newest superbatch, else at the beginning."""
        first = 0
        if self._live:
            oldest, newest_end = self._live[0][0], self._live[-1][1]
            wrapped = self._live[-1][0] < oldest
            first = newest_end
            if not wrapped and newest_end + pages > self.pages:
                first = 0
                wrapped = True
            room = (oldest if wrapped else self.pages) - first
        else:
            room = self.pages
        if pages > room:
            reason = f"the annex has room for {room} of the {pages} pages that a superbatch needs"
            raise ScratchFull(errno.ENOSPC, reason, str(self._scratch))
        self._live.append((first, first + pages))
        return first
