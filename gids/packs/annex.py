"""The annex of a table: scratch with copies of the rows that an offline cache misses, in their order of use.

A superbatch is planned from the rows that its minibatches use; a sweep over the table then writes the copies.
From then on its minibatches are read in their order, from front to back. Knows rows and steps; knows nothing
of minibatches.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.cache.feature_cache import read_error
from gids.cache.output_dtype import RowForm
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs.scratch import Scratch, ScratchFull
from gids.store import Table
from gids.store.geometry import align_up

if TYPE_CHECKING:
    from gids.io import Engine

Rows = npt.NDArray[np.uint32]
"""Positions of rows on disk, as a minibatch reads them."""

_CHUNK_BYTES = 1 << 20
"""The sweep reads the table in pieces of this length, where memory allows."""
_CHUNKS = 16
"""Pieces that the sweep has in memory. They take a quarter of what it works in, write buffers the rest."""
_GROUP_BYTES = 256 << 10
"""Of a write, where memory allows: each run of a superbatch has a buffer of this length. With 64 KiB, a sweep
of 4 M rows of 512 B takes 1.5 times as long."""
_WRITERS = 8
_PIECE_BYTES = 2 << 20
"""Runs are read in pieces of this length, a huge page, or shorter ones if memory is small."""
_PIECES = 8
"""Pieces in memory: what is read before it is due."""
_READ_BYTES = 512 << 10
_GAP_BYTES = 16 << 10
_GROWTH = 16 << 20
_USE_BYTES, _RUN_USE_BYTES = 32, 28
"""Memory of a plan, while it is made, for each use of the longest step; and for each run placed at a time."""


class RowUses:
    """The rows of a table that each minibatch of a superbatch uses, in a scratch file.

    After Annex.plan(): where the rows come from.
    """

    def __init__(self, table: Table, scratch: Scratch) -> None:
        self._file, self._crcs = scratch.open(striped=False), list[int]()
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
        self._crcs.append(_crc_of(rows))

    def has(self, step: int, rows: Rows) -> bool:
        """Whether the minibatch of this step used these rows, in this order."""
        return len(rows) == self.native.count(step) and _crc_of(rows) == self._crcs[step]

    def __len__(self) -> int:
        return len(self.native)

    def close(self) -> None:
        """Give the scratch back. Idempotent. It cannot be used any more."""
        vars(self).pop("native", None)  # which has a descriptor
        self._file.close()


class Superbatch:
    """A superbatch of a table, planned. Swept once Annex.sweep() returned. chunks: of the table, in memory of
    the sweep."""

    def __init__(self, plan: _core.AnnexPlan, uses: RowUses, *, chunks: int) -> None:
        self.plan, self.uses, self.chunks = plan, uses, chunks
        self.file: AnnexFile | None = None  # once swept

    def __len__(self) -> int:
        return len(self.uses)


class AnnexFile:
    """A scratch file for one superbatch after the other, and what reads it."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch.open()
        try:
            self.engine = open_engine(
                self.scratch.paths,
                depth=2 * _PIECES,
                max_read_bytes=_READ_BYTES,
                direct=self.scratch.direct,
            )
        except BaseException:
            self.scratch.close()
            raise

    def close(self) -> None:
        """Give the scratch back. Idempotent. No reader may be open."""
        self.engine.close()
        self.scratch.close()


class Annex:
    """The annex of one table: a scratch file for each superbatch that is swept or read."""

    ROW_BYTES = 4
    """Memory of a plan for each row of the table, while it is made."""

    def __init__(self, table: Table, scratch: Scratch) -> None:
        self._table, self._scratch = table, scratch
        self._free: list[AnnexFile] = []  # blocks that were written before are written faster than new ones

    @property
    def free_bytes(self) -> int:
        """Scratch of superbatches that were released, which the next ones use."""
        return sum(file.scratch.nbytes for file in self._free)

    def preparing_bytes(self, uses: RowUses, threads: int) -> int:
        """The least memory to plan and to sweep a superbatch with these uses, one after the other."""
        steps, table = len(uses), self._table
        counts = steps * _core.ANNEX_RANGES * (4 * threads + 2)
        lists = uses.native.longest * (_USE_BYTES + _RUN_USE_BYTES * min(threads, _core.ANNEX_RUNS_AT_ONCE))
        buffers = _buffers(steps) * _core.annex_group_bytes(table.row_bytes)
        chunks = 2 * table.page_bytes * len(table.shard_paths)
        return max(self.ROW_BYTES * table.row_count + counts + lists, 4 * chunks, buffers * 4 // 3)

    def plan(
        self,
        uses: RowUses,
        *,
        lines: int,
        work_bytes: int,
        workers: _core.Workers,
        first_file: int = 0,
        cancel: _core.Cancel | None = None,
    ) -> Superbatch:
        """Plan the copies for a cache of so many lines.

        work_bytes: memory that the sweep may take. first_file: the engine's number of the table's first
        shard. cancel: ends it from another thread. Blocks. Raises OSError.
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
            group_bytes=min(_GROUP_BYTES, work_bytes * 3 // 4 // _buffers(len(uses))),
            chunk_bytes=max(table.page_bytes, min(_CHUNK_BYTES, work_bytes // 4 // _CHUNKS)),
        )
        return Superbatch(plan, uses, chunks=max(2, min(_CHUNKS, work_bytes // 4 // plan.chunk_bytes)))

    def sweep(
        self,
        superbatch: Superbatch,
        engine: Engine,
        *,
        workers: _core.Workers,
        checksums: npt.NDArray[np.uint32] | None = None,
        cancel: _core.Cancel | None = None,
    ) -> dict[str, int | float]:
        """Write the copies. engine: of the table. checksums: uint32[page_count], to compare with. Blocks.

        Returns bytes_read, bytes_written, busy_s. Raises StorageError, ScratchFull.
        """
        plan = superbatch.plan
        superbatch.file = self._free.pop() if self._free else AnnexFile(self._scratch)
        superbatch.file.scratch.reserve(plan.nbytes)
        # Neither has a name: the frame of an error that is raised below would keep its descriptors.
        result = _core.AnnexSweep(
            engine.native,
            _core.PackWriter.create(
                superbatch.file.scratch.fds,
                threads=_WRITERS,
                buffers=_buffers(plan.runs),
                buffer_bytes=plan.group_bytes,
            ),
            workers,
            superbatch.uses.native,
            plan,
            cancel=cancel,
            chunks=superbatch.chunks,
            gap_bytes=_GAP_BYTES,
            checksums=checksums,
        ).wait()
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
        assert superbatch.file is not None
        return _core.RunReader(
            superbatch.file.engine.native,
            workers,
            memory,
            superbatch.uses.native,
            superbatch.plan,
            stored_as=form.stored_as,
            wanted_as=form.wanted_as,
            row_values=form.values,
            scales=form.scales,
        )

    def release(self, superbatch: Superbatch, *, bad: bool = False) -> None:
        """Its scratch may be used again, unless it is bad. It must not be read any more. Idempotent."""
        superbatch.uses.close()
        file, superbatch.file = superbatch.file, None
        if file is not None and bad:
            file.close()
        elif file is not None:
            self._free.append(file)

    def close(self) -> None:
        """Give the scratch back of superbatches that were released. Idempotent."""
        while self._free:
            self._free.pop().close()


def _crc_of(rows: Rows) -> int:
    return _core.crc32c_extend(0, rows.view(np.uint8))


def _buffers(runs: int) -> int:
    """Write buffers of a sweep: each run has one, and others are written."""
    return runs + max(4, min(48, runs // 4))


def pieces_of(memory_bytes: int, tables: int) -> tuple[int, int]:
    """(number, bytes) of the pieces of each table, of a loader with so much memory."""
    nbytes = max(1 << 16, min(_PIECE_BYTES, memory_bytes // 64 // tables))
    return max(2, min(_PIECES, memory_bytes // 16 // tables // nbytes)), nbytes
