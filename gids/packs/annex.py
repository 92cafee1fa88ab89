"""The annex of a table: scratch with copies of the rows that an offline cache misses, in the order of their use.

A superbatch is planned from the rows that its minibatches use; a sweep over the table then writes the copies.
From then on its minibatches are read in their order, from front to back. Knows rows and steps; knows nothing
of minibatches.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.cache.feature_cache import read_error
from gids.cache.output_dtype import RowForm
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs.scratch import BLOCK, Scratch, ScratchFull
from gids.store import Table
from gids.store.geometry import align_up

if TYPE_CHECKING:
    from gids.io import Engine

Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

CHUNK_BYTES = 1 << 20
"""The sweep reads the table in pieces of this length."""
CHUNKS = 16
"""Pieces that the sweep has in memory."""
GROUP_BYTES = 256 << 10
"""Of a write, where memory allows."""
PIECE_BYTES = 2 << 20
"""Runs are read in pieces of this length: a huge page."""
PIECES = 8
"""Pieces in memory: what is read before it is due."""
_READ_BYTES = 512 << 10
_GAP_BYTES = 16 << 10
_WRITERS = 8
_BUFFERS = 48
"""Write buffers beside one for each run."""
_GROWTH = 16 << 20


class RowUses:
    """The rows of a table that each minibatch of a superbatch uses, in a scratch file.

    After Annex.plan(): where the rows come from.
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
        end = (self.native.uses + len(rows)) * _core.ANNEX_USE_BYTES
        if end > self._file.nbytes:
            self._file.reserve(align_up(end, _GROWTH))
        self.native.append(rows)

    def __len__(self) -> int:
        return len(self.native)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        self._file.close()


class Superbatch:
    """A superbatch of a table, planned. first_byte: of the annex, where its runs begin."""

    def __init__(self, plan: _core.AnnexPlan, uses: RowUses, first_byte: int) -> None:
        self.plan, self.uses, self.first_byte = plan, uses, first_byte

    def __len__(self) -> int:
        return len(self.uses)


class Annex:
    """The annex of one table: nbytes of scratch, in which superbatches follow one another in a ring.

    Raises ScratchFull if there is no room, StorageError if a directory takes no file.
    """

    def __init__(self, table: Table, scratch: Scratch, nbytes: int) -> None:
        self._table, self._scratch = table, scratch
        self._file = scratch.open(nbytes)
        self.nbytes = align_up(nbytes, BLOCK)
        self._live: deque[tuple[int, int]] = deque()  # (first byte, end) of superbatches, oldest first
        try:
            self._file.reserve(self.nbytes)
            self._engine = open_engine(
                self._file.paths, depth=2 * PIECES, max_read_bytes=_READ_BYTES, direct=self._file.direct
            )
        except BaseException:
            self._file.close()
            raise

    def plan(
        self,
        uses: RowUses,
        *,
        workers: _core.Workers,
        lines: int,
        buffer_bytes: int = 1 << 62,
        first_file: int = 0,
        cancel: _core.Cancel | None = None,
    ) -> Superbatch:
        """Plan the copies for a cache of so many lines, and find a place for them in the ring.

        buffer_bytes: memory for write buffers. first_file: the engine's number of the table's first shard.
        cancel: ends it from another thread. Blocks. Raises ScratchFull if the ring has no room, OSError.
        """
        table = self._table
        plan = _core.plan_annex(
            uses.native,
            workers,
            cancel=cancel,
            row_count=table.row_count,
            row_bytes=table.row_bytes,
            page_bytes=table.page_bytes,
            rows_per_page=table.rows_per_page,
            shard_count=len(table.shard_paths),
            first_file=first_file,
            lines=lines,
            group_bytes=min(GROUP_BYTES, buffer_bytes // (len(uses) + _BUFFERS)),
            chunk_bytes=max(CHUNK_BYTES, table.page_bytes),
        )
        return Superbatch(plan, uses, self._place(plan.nbytes))

    def sweep(
        self,
        superbatch: Superbatch,
        engine: Engine,
        *,
        workers: _core.Workers,
        checksums: npt.NDArray[np.uint32] | None = None,
    ) -> _core.AnnexSweep:
        """Begin to write the copies. engine: of the table. checksums: uint32[page_count], to compare with."""
        plan = superbatch.plan
        writer = _core.PackWriter.create(
            self._file.fds,
            threads=_WRITERS,
            buffers=plan.runs + _BUFFERS,
            buffer_bytes=plan.group_bytes,
        )
        return _core.AnnexSweep(
            engine.native,
            writer,
            workers,
            plan,
            chunks=CHUNKS,
            gap_bytes=_GAP_BYTES,
            first_byte=superbatch.first_byte,
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

    def reader(
        self, superbatch: Superbatch, memory: _core.RunMemory, form: RowForm, *, workers: _core.Workers
    ) -> _core.RunReader:
        """Begin to read a superbatch that is swept. form: of the rows that come out."""
        return _core.RunReader(
            self._engine.native,
            workers,
            memory,
            superbatch.uses.native,
            superbatch.plan,
            first_byte=superbatch.first_byte,
            stored_as=form.stored_as,
            wanted_as=form.wanted_as,
            row_values=form.values,
            scales=form.scales,
        )

    def directory_of(self, file: int) -> str:
        """The directory that has this file of the annex, for errors."""
        return str(self._scratch.directories[file])

    def release(self) -> None:
        """Free the oldest superbatch's place. It must not be read any more."""
        self._live.popleft()

    def close(self) -> None:
        """Give the scratch back. Idempotent. No reader may be open."""
        self._engine.close()
        self._file.close()

    def _place(self, nbytes: int) -> int:
        """Where so many bytes fit: after the newest superbatch, else at the beginning."""
        first, room = 0, self.nbytes
        if self._live:
            oldest, (newest, end) = self._live[0][0], self._live[-1]
            wrapped = newest < oldest
            first = end
            if not wrapped and end + nbytes > self.nbytes:
                first, wrapped = 0, True
            room = (oldest if wrapped else self.nbytes) - first
        if nbytes > room:
            reason = f"the annex has room for {room} of the {nbytes} bytes that a superbatch needs"
            raise ScratchFull(errno.ENOSPC, reason, str(self._scratch))
        self._live.append((first, first + nbytes))
        return first
