"""A superbatch: minibatches that were sampled ahead, cut into packs, and trained from packs in memory.

Made by the loader's PackSwitch for each layout. Two packs are in memory: one that is trained, and the next
one, which is being read.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gids import _core
from gids.cache.feature_cache import read_error
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs.cut import Layout
from gids.packs.memory import (
    ALIGNMENT,
    PIECES,
    READS,
    SPARE_BUFFERS,
    Extent,
    Load,
    PackPlan,
    PackSource,
    RowMemory,
    Wanted,
)
from gids.packs.scratch import Scratch, ScratchFull
from gids.packs.spool import Reads, Spool
from gids.profiling import stage
from gids.store.geometry import align_up
from gids.stored_file import AnyFile

if TYPE_CHECKING:
    from gids.store import Table

_WRITERS = 8
"""Threads that write to scratch, per disk: so many large writes are in flight."""


@dataclass(eq=False, kw_only=True)
class PackMachine:
    """What the superbatches of a loader share: memory for packs, and options.

    plan: how memory is shared out. make_rows: makes the memory for packs. threads: threads of a sweep.
    engine, direct: of gids.open(). output_rows: rows that an output has room for, by table. minibatch_bytes:
    that a sampled minibatch has room for. parts: a minibatch may be cut into several packs. counters,
    seconds: get what superbatches read and write, and what they take, by the names in stats()["packs"].

    Attributes: rows: the memory; collected: sets to collect a pack's rows in.
    """

    tables: Sequence[Table]
    plan: PackPlan
    make_rows: Callable[[], RowMemory]
    threads: int
    check_crc: bool
    output_rows: dict[str, int]
    minibatch_bytes: int
    engine: str
    direct: bool
    gap_bytes: int
    parts: bool
    counters: Counter[str]
    seconds: dict[str, float]

    def __post_init__(self) -> None:
        self.rows = self.make_rows()
        self.collected = [_core.RowSet.create(t.row_count) for t in self.tables]
        self.priority = _core.Priority.create()

    def again(self) -> PackMachine:
        """One with other memory for packs, which is taken when rows are written to it. On the host only."""
        made = replace(self)
        made.priority = self.priority
        return made

    def close(self) -> None:
        """Give the memory back. Idempotent. No superbatch is open."""
        self.rows.close()


@dataclass
class _Pack:
    """lists: RowList of each table. parts: offset of each table's rows in the pack. at, nbytes: what is in
    scratch."""

    end: int
    lists: list[Any]
    parts: list[int]
    at: int
    nbytes: int


class Superbatch:
    """Minibatches [first, end) of a spool. Call prepare(), begin(), then take() and gather() for each.

    layout: for all minibatches of the spool. This superbatch has as many packs, from first_pack on, as the
    memory for row lists and write buffers, and room_bytes of scratch allow. fill_resident: the resident rows
    are not in memory yet. beside: others use the memory until begin().
    """

    def __init__(
        self,
        machine: PackMachine,
        spool: Spool,
        layout: Layout,
        first_pack: int,
        scratch: Scratch,
        *,
        room_bytes: int,
        fill_resident: bool,
        beside: bool = False,
    ) -> None:
        self._machine, self._spool, self.layout = machine, spool, layout
        self._first_half = 0
        self._scratch = scratch
        self._fill_resident = fill_resident
        begin = layout.packs[first_pack - 1][0] if first_pack else 0
        self.next = begin
        self._resident = layout.resident.rows
        self._resident_parts, resident_bytes = self._parts(self._resident)
        self._halves = [resident_bytes, resident_bytes + layout.resident.pack_bytes]
        self._packs: list[_Pack] = []
        # Where a sweep cannot write to the memory, resident rows come from scratch, like a pack.
        self._from_scratch = beside or machine.rows.swept is None
        self._resident_nbytes = resident_bytes if fill_resident and self._from_scratch else 0
        at, lists_bytes, longest = self._resident_nbytes, layout.resident.lists_bytes, 0
        lent = 0 if machine.plan.overlap else machine.rows.lend_outputs()
        self._write_bytes = machine.plan.write_bytes(layout.resident.pack_bytes, lent)
        most_packs = machine.plan.most_packs(self._write_bytes)
        numbered = enumerate(layout.packs[first_pack:], first_pack)
        for end, group in itertools.groupby(numbered, lambda pack: pack[1][0]):
            # One pack with all minibatches [begin, end), or several with parts of one minibatch.
            packs = [(number, rows) for number, (_, rows) in group]
            sizes = [self._nbytes(rows) for _, rows in packs]
            full = len(self._packs) + len(packs) > most_packs or at + sum(sizes) > room_bytes
            if self._packs and (full or lists_bytes < longest):
                break
            if any(number not in layout.lists for number, _ in packs):
                self._collect(begin, end)
            skipped, left_bytes = [0] * len(machine.tables), lists_bytes
            for (number, rows), nbytes in zip(packs, sizes, strict=True):
                lists = layout.lists.pop(number, None) or self._collected(skipped, rows)
                parts, _ = self._parts(lists)
                self._packs.append(_Pack(end, lists, parts, at, nbytes))
                at += nbytes
                lists_bytes -= sum(rows.nbytes for rows in lists)
                skipped = [a + b for a, b in zip(skipped, rows, strict=True)]
            longest = max(longest, left_bytes - lists_bytes)
            begin = end
        self.end = begin
        self.last_pack = first_pack + len(self._packs)
        self._current = -1  # the pack that is being trained
        self._sets: list[Any] = []  # its rows in each table
        self._resident_sets: list[Any] = []
        self._loads: dict[int, Load] = {}
        self._source: PackSource | None = None
        self.file: Any = None
        self._sweep: Any = None
        self._writer: Any = None
        self._opened = ExitStack()
        self._counters, self._seconds = machine.counters, machine.seconds
        self.begun = False

    @property
    def resident_rows(self) -> int:
        return sum(map(len, self._resident))

    @property
    def pack_count(self) -> int:
        return len(self._packs)

    @property
    def in_last_pack(self) -> bool:
        """Whether one half of the memory is free for the next superbatch."""
        return self._current == len(self._packs) - 1

    @property
    def last_half(self) -> int:
        """The half of the memory that the last pack is in."""
        return self._half_of(len(self._packs) - 1)

    @property
    def ready(self) -> bool:
        """Whether begin() would not wait for a sweep."""
        return self._sweep is None or bool(self._sweep.ended)

    def prepare(self, *, spare: bool = False) -> None:
        """Start the sweep to scratch. spare: as of Scratch.open().

        Raises ScratchFull, or OSError for files that cannot be opened.
        """
        machine = self._machine
        paths: list[AnyFile] = [shard for t in machine.tables for shard in t.shards]
        packed = align_up(self._resident_nbytes + sum(pack.nbytes for pack in self._packs), ALIGNMENT)
        self.file = self._scratch.open(packed, spare=spare)
        self._opened.callback(self.file.close, keep=True)
        self.file.reserve(packed)
        files = range(len(paths), len(paths) + len(self.file.fds))
        paths += self.file.paths
        self._engine = open_engine(
            paths,
            "auto" if machine.engine == "mmap" else machine.engine,  # what is written cannot be mapped
            depth=READS * machine.plan.disks,
            direct=machine.direct and self.file.direct,
            max_read_bytes=machine.plan.read_bytes,
        )
        self._opened.callback(self._engine.close)
        if not machine.plan.overlap:
            machine.rows.discard(self._halves[0], 2 * self.layout.resident.pack_bytes)
        self._source = PackSource(self._engine, machine.priority, files)
        buffers, buffer_bytes = machine.plan.buffers(len(self._packs), self._write_bytes)
        self._writer = _core.PackWriter.create(
            self.file.fds,
            threads=min(SPARE_BUFFERS, _WRITERS * self._scratch.disks),
            buffers=buffers,
            buffer_bytes=buffer_bytes,
        )
        self._sweep = self._start_sweep()

    def begin(self, first_half: int = 0) -> None:
        """Start reading the first pack into one half of the memory, once all is swept.

        Blocks. Raises as finish_sweep().
        """
        self.begun, self._first_half = True, first_half
        self.finish_sweep()
        self._load(0)

    def finish_sweep(self) -> None:
        """Wait for the sweep. Idempotent. Raises ScratchFull, or StorageError if a page could not be read or
        scratch could not be written: then packs are not complete."""
        if self._sweep is None:
            return
        begun = time.perf_counter()
        result, self._sweep = self._sweep.wait(), None
        self._seconds["sweep"] += time.perf_counter() - begun
        self._counters["bytes_read"] += result["bytes_read"]
        self._counters["bytes_written"] += self._writer.bytes_written
        directory = self._scratch.directories[self._writer.failed_file]
        self._writer = None
        for file, offset, code in result["bad_pages"][:1]:
            shards = [shard for t in self._machine.tables for shard in t.shard_paths]
            raise read_error(code, shards[file], offset)
        if result["error"]:
            kind = ScratchFull if result["error"] in (errno.ENOSPC, errno.EDQUOT) else StorageError
            reason = "cannot write packs: " + os.strerror(result["error"])
            raise kind(result["error"], reason, directory)

    def take(self) -> tuple[Any, Reads]:
        """The next minibatch, and what it reads. It is lost if this raises StorageError."""
        self.next += 1
        return self._spool.take(self.next - 1)

    def gather(self, reads: Reads) -> dict[str, torch.Tensor]:
        """The features, by table, of the minibatch that was taken. Blocks until its packs are in memory.

        Raises StorageError if a pack cannot be read. After an OSError the minibatch is not taken.
        """
        index = self.next - 1
        try:
            while not self._sets or index >= self._packs[self._current].end:
                self._next_pack()
            begun, waited = time.perf_counter(), self._seconds["wait"]
            features = self._machine.rows.gather(self._wanted(reads))
        except OSError:
            self.next = index
            raise
        self._seconds["gather"] += time.perf_counter() - begun - (self._seconds["wait"] - waited)
        if self._machine.parts and self.next == self._packs[self._current].end:
            with suppress(OSError):  # tried again when it is due
                self._load(self._current + 2)
        return features

    def _wanted(self, reads: Reads) -> Iterator[list[Wanted]]:
        """The rows of a minibatch, for each of its packs."""
        first = True
        while True:
            pack, half = self._packs[self._current], self._halves[self._half_of(self._current)]
            wanted = []
            for i, (table, rows) in enumerate(zip(self._machine.tables, reads.rows, strict=True)):
                if table.name in reads.tables:
                    resident = (self._resident_sets[i], self._resident_parts[i])
                    packed = (self._sets[i], half + pack.parts[i])
                    wanted.append(Wanted(table, rows, (resident, packed) if first else (packed,)))
            yield wanted
            following = self._packs[self._current + 1 : self._current + 2]
            if not following or following[0].end != pack.end:
                return
            self._next_pack()
            first = False

    def close(self) -> None:
        """End what runs in the background and give scratch back. Idempotent. Blocks for one read at most."""
        if self.ready:
            with suppress(OSError):
                self.finish_sweep()
        else:
            self._sweep.cancel()
            result, self._sweep = self._sweep.wait(), None
            self._counters["bytes_read"] += result["bytes_read"]
            self._counters["bytes_written"] += self._writer.bytes_written
        self._writer = None  # which keeps the scratch file, and buffers
        for load in self._loads.values():
            load.close()
        self._loads.clear()
        self._opened.close()

    def _half_of(self, pack: int) -> int:
        return (self._first_half + pack) % 2

    def _next_pack(self) -> None:
        self._current += 1
        begun = time.perf_counter()
        pack = self._packs[self._current]
        with stage("wait"):
            self._sets, bad = self._loads.pop(self._current).wait()
        for offset, code in bad[:1]:
            directory = self.file.directory_of(offset)
            raise StorageError(code, f"cannot read a pack: {os.strerror(code)}", directory, offset)
        first = not self._current
        self._counters["bytes_read"] += pack.nbytes + (self._resident_nbytes if first else 0)
        if not self._resident_sets:
            self._resident_sets = self._machine.rows.keep(self._resident)
        if not first:
            self._packs[self._current - 1].lists.clear()
        self._seconds["wait"] += time.perf_counter() - begun
        self._load(self._current + 1)

    def _load(self, index: int) -> None:
        """Begin to fill one half of the memory with a pack, if there is one and it is not on its way."""
        if index >= len(self._packs) or index in self._loads:
            return
        pack, half = self._packs[index], self._half_of(index)
        extents = [Extent(pack.at, self._halves[half], pack.nbytes)]
        if not index and self._resident_nbytes:
            extents.insert(0, Extent(0, 0, self._resident_nbytes))
        assert self._source is not None
        self._loads[index] = self._machine.rows.load(self._source, extents, pack.lists, half)

    def _targets(self, i: int) -> list[Any]:
        """Where the sweep writes the rows of table i: (rows, memory or None for scratch, offset)."""
        targets: list[Any] = [(pack.lists[i], None, pack.at + pack.parts[i]) for pack in self._packs]
        if self._fill_resident:
            rows = _core.RowList.create(self._resident[i])
            memory = None if self._from_scratch else self._machine.rows.swept
            targets.append((rows, memory, self._resident_parts[i]))
        return targets

    def _start_sweep(self) -> Any:
        machine, tables, first_file = self._machine, [], 0
        for i, t in enumerate(machine.tables):
            tables.append(
                _core.SweepTable(
                    row_count=t.row_count,
                    row_bytes=t.row_bytes,
                    page_bytes=t.page_bytes,
                    rows_per_page=t.rows_per_page,
                    shard_count=len(t.shard_paths),
                    first_file=first_file,
                    checksums=np.asarray(t.checksums()) if machine.check_crc else None,
                    targets=self._targets(i),
                )
            )
            first_file += len(t.shard_paths)
        return _core.Sweep(
            self._engine.native,
            self._writer,
            machine.priority,
            tables,
            piece_bytes=machine.plan.piece_bytes,
            pieces=PIECES * machine.plan.disks,
            gap_bytes=machine.gap_bytes,
            threads=machine.threads,
        )

    def _collect(self, begin: int, end: int) -> None:
        """Collect the rows of minibatches [begin, end) that are not resident, by table."""
        for rows in self._machine.collected:
            rows.clear()
        for i in range(begin, end):
            for rows, read, resident in zip(
                self._machine.collected, self._spool.rows(i), self._resident, strict=True
            ):
                rows.insert(read, resident)

    def _collected(self, skipped: Sequence[int], rows: Sequence[int]) -> list[Any]:
        """So many of the rows that were collected, without the first skipped ones, by table."""
        return [
            _core.RowList.create(collected, *part)
            for collected, *part in zip(self._machine.collected, skipped, rows, strict=True)
        ]

    def _nbytes(self, rows: Sequence[int]) -> int:
        """Of a pack with so many rows of each table."""
        return self._parts([range(n) for n in rows])[1]

    def _parts(self, sets: Sequence[Sized]) -> tuple[list[int], int]:
        """Where each table's rows begin if they are in this order, and the bytes of all. sets: by table."""
        parts, at = [], 0
        for t, rows in zip(self._machine.tables, sets, strict=True):
            parts.append(at)
            at += align_up(len(rows) * t.row_bytes, ALIGNMENT)
        return parts, at
