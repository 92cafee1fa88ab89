"""A superbatch: minibatches that were sampled ahead, cut into packs, and trained from packs in memory.

Made by the loader's PackedStream for each layout. Two packs are in memory: one that is trained, and the next
one, which is being read.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gids import _core
from gids.cache.output_dtype import out_dtype_of, row_form
from gids.errors import StorageError
from gids.io import open_engine
from gids.packs.cut import Layout
from gids.packs.memory import ALIGNMENT, PIECES, READS, PackPlan
from gids.packs.scratch import Scratch, ScratchFull
from gids.packs.spaces import Rows, Space
from gids.packs.spool import Spool
from gids.store.dtypes import make_bools_proper
from gids.store.geometry import align_up

if TYPE_CHECKING:
    from gids.store import Table

_WRITERS = 8
"""Threads that write to scratch: so many large writes are in flight."""


class PackMachine:
    """What the superbatches of a loader share: memory for packs, outputs and threads.

    plan: how memory is shared out. threads: threads that copy rows. engine, direct: of gids.open().
    output_rows: rows that an output has room for, by table.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        plan: PackPlan,
        *,
        threads: int,
        check_crc: bool,
        output_dtype: torch.dtype | None,
        output_rows: dict[str, int],
        engine: str,
        direct: bool,
        gap_bytes: int,
    ) -> None:
        self.spaces, self.plan, self.check_crc = list(spaces), plan, check_crc
        self.tables: list[Table] = [t for space in spaces for t in space.tables]
        self.memory = _core.PackMemory.create(plan.pack_bytes)
        self.workers = _core.Workers.create(threads)
        self.threads = threads
        self.priority = _core.Priority.create()
        self.found = [_core.RowSet.create(space.row_count) for space in spaces]  # to collect a pack's rows in
        self.bad_resident: dict[str, list[_BadRows]] = {}  # resident rows that could not be read
        self.engine_kind = "auto" if engine == "mmap" else engine  # what is written cannot be mapped
        self.direct, self.gap_bytes = direct, gap_bytes
        self._pool = _core.BufferPool.create(plan.purposes["outputs"])
        self._dtypes = {t.name: out_dtype_of(t, output_dtype) for t in self.tables}
        self._forms = {t.name: row_form(t, output_dtype) for t in self.tables}
        self.output_rows = output_rows

    @property
    def peak_output_bytes(self) -> int:
        found: int = self._pool.peak_bytes
        return found

    def gather(self, table: Table, rows: Rows, holders: list[tuple[Any, Any, int]]) -> torch.Tensor:
        """Copy rows of a table, in the output's dtype, from the first of holders that has them.

        holders: (RowSet, PackMemory, offset).
        """
        form = self._forms[table.name]
        room = self.output_rows.get(table.name, 0)
        flat = self._pool.take(len(rows) * form.out_row_bytes, room * form.out_row_bytes)
        missing = _core.gather_packed(
            self.workers,
            rows,
            holders,
            row_bytes=table.row_bytes,
            stored_as=form.stored_as,
            wanted_as=form.wanted_as,
            row_values=form.values,
            scales=form.scales,
            out=flat.reshape(len(rows), form.out_row_bytes),
        )
        if missing:
            raise AssertionError(f"{missing} rows of '{table.name}' are in no pack")
        tensor = torch.from_numpy(flat).view(self._dtypes[table.name]).view(len(rows), *table.shape)
        return make_bools_proper(tensor)


def read_error(code: int, shard: str | os.PathLike[str], offset: int) -> StorageError:
    """The error of a page, or of a row in it. code: an errno, EBADMSG for a wrong checksum."""
    reason = os.strerror(code)
    if code == errno.EBADMSG:
        reason = "the page's checksum is wrong"
    elif code == errno.ENODATA:
        reason = "the shard ends before this page; it was truncated"
    return StorageError(code, f"cannot read a page: {reason}", shard, offset)


@dataclass
class _BadRows:
    """Rows of a table that could not be read, as pages or as rows, and the error of each."""

    rows: np.ndarray
    divisor: int
    errors: list[StorageError]

    def error_of(self, rows: Rows) -> StorageError | None:
        """Of the first one of these rows that could not be read."""
        lost = np.isin(self.rows, rows // self.divisor)
        return self.errors[int(lost.argmax())] if lost.any() else None


@dataclass
class _Pack:
    """lists: RowList of each space. at: offset in scratch. parts: offset of each table's rows in the pack."""

    end: int
    lists: list[Any]
    at: int
    parts: dict[str, int]
    nbytes: int


class Superbatch:
    """Minibatches [first, end) of a spool. Call prepare(), begin(), then take() for each.

    layout: for all minibatches of the spool. This superbatch has as many packs, from first_pack on, as the
    memory for row lists and write buffers, and room_bytes of scratch allow. fill_resident: the resident rows
    are not in memory yet.
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
    ) -> None:
        self._machine, self._spool, self.layout = machine, spool, layout
        self._first_half = 0
        self._scratch = scratch if layout.way == "pack" else None
        self._fill_resident = fill_resident
        begin = layout.packs[first_pack - 1][0] if first_pack else 0
        self.next = self.first = begin
        self._resident = layout.resident.rows
        self._resident_parts, resident_bytes = self._parts(self._resident)
        self._halves = [resident_bytes, resident_bytes + layout.resident.pack_bytes]
        self._packs: list[_Pack] = []
        at, lists_bytes = 0, layout.resident.lists_bytes
        self._write_bytes = machine.plan.write_bytes(layout.resident.pack_bytes, machine.peak_output_bytes)
        most_packs = machine.plan.most_packs(self._write_bytes) if self._scratch else len(layout.packs)
        for end, rows in layout.packs[first_pack : first_pack + most_packs]:
            nbytes = sum(
                align_up(n * t.row_bytes, ALIGNMENT)
                for n, space in zip(rows, machine.spaces, strict=True)
                for t in space.tables
            )
            if self._scratch is not None and self._packs and at + nbytes > room_bytes:
                break
            lists = self._lists_of(begin, end)
            parts, nbytes = self._parts(lists)
            self._packs.append(_Pack(end, lists, at, parts, nbytes))
            at, begin = at + nbytes, end
            lists_bytes -= sum(of.nbytes for of in lists)
            if lists_bytes <= 0:
                break
        self.end = begin
        self.last_pack = first_pack + len(self._packs)
        self._current = -1  # the pack that is being trained
        self._sets: list[Any] = []  # its rows in each space
        self._loads: dict[int, Any] = {}
        self._bad: dict[str, list[_BadRows]] = {}  # in every pack
        self._bad_in_pack: dict[str, list[_BadRows]] = {}
        self._file: Any = None
        self._sweep: Any = None
        self._writer: Any = None
        self._opened = ExitStack()
        self.bytes_read = self.bytes_written = 0
        self.seconds = {"sweep": 0.0, "wait": 0.0, "gather": 0.0}
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

    def prepare(self) -> None:
        """Start the sweep to scratch. Raises ScratchFull, or OSError for files that cannot be opened."""
        machine = self._machine
        paths: list[str] = [os.fspath(path) for t in machine.tables for path in t.shard_paths]
        self._shard_paths = list(paths)
        direct = machine.direct
        if self._scratch is not None:
            self._file = self._scratch.open()
            self._opened.callback(self._file.close)
            self._file.reserve(align_up(sum(pack.nbytes for pack in self._packs), ALIGNMENT))
            paths.append(self._file.path)
            direct = direct and self._file.direct
        self._engine = open_engine(
            paths,
            machine.engine_kind,
            depth=READS,
            direct=direct,
            max_read_bytes=machine.plan.read_bytes,
        )
        self._opened.callback(self._engine.close)
        if self._scratch is not None:
            if not machine.plan.overlap:
                machine.memory.discard(self._halves[0], 2 * self.layout.resident.pack_bytes)
            buffers, buffer_bytes = machine.plan.buffers(len(self._packs), self._write_bytes)
            writer = _core.PackWriter.create(
                self._file.fd, threads=_WRITERS, buffers=buffers, buffer_bytes=buffer_bytes
            )
            targets = {
                t.name: [(pack.lists[s], None, pack.at + pack.parts[t.name]) for pack in self._packs]
                for s, space in enumerate(machine.spaces)
                for t in space.tables
            }
            self._sweep = self._start_sweep(self._with_resident(targets), writer)
            self._writer = writer

    def begin(self, first_half: int = 0) -> None:
        """Wait for the sweep, then start reading the first pack into one half of the memory.

        Blocks. Raises ScratchFull, or StorageError for scratch.
        """
        self.begun, self._first_half = True, first_half
        if self._scratch is not None:
            self._finish_sweep(self._scratch)
        self._load(0)

    def _finish_sweep(self, scratch: Scratch) -> None:
        begun = time.perf_counter()
        result, self._sweep = self._sweep.wait(), None
        self.seconds["sweep"] += time.perf_counter() - begun
        self.bytes_written += self._writer.bytes_written
        self._writer = None
        self._finished(result, self._bad, resident=True)
        if result["error"]:
            kind = ScratchFull if result["error"] in (errno.ENOSPC, errno.EDQUOT) else StorageError
            reason = "cannot write packs: " + os.strerror(result["error"])
            raise kind(result["error"], reason, scratch.directory)

    def take(self) -> tuple[Any, dict[str, torch.Tensor], StorageError | None]:
        """The next minibatch with its features by table, and an error if some of them could not be read.

        Blocks until its pack is in memory.
        """
        index = self.next
        if self._current < 0 or index == self._packs[self._current].end:
            self._next_pack()
        self.next = index + 1
        minibatch, names, rows = self._spool.take(index)
        begun = time.perf_counter()
        pack, half = self._packs[self._current], self._halves[self._half_of(self._current)]
        memory, features, error = self._machine.memory, {}, None
        for s, (space, of_space) in enumerate(zip(self._machine.spaces, rows, strict=True)):
            for table in space.tables:
                name = table.name
                if name not in names:
                    continue
                holders = [
                    (self._resident[s], memory, self._resident_parts[name]),
                    (self._sets[s], memory, half + pack.parts[name]),
                ]
                features[name] = self._machine.gather(table, of_space, holders)
                for of in (self._machine.bad_resident, self._bad, self._bad_in_pack):
                    for bad in of.get(name, ()):
                        error = error or bad.error_of(of_space)
        self.seconds["gather"] += time.perf_counter() - begun
        return minibatch, features, error

    def close(self) -> None:
        """End what runs in the background and give scratch back. Idempotent. Blocks for one read at most."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep = self._writer = None  # which keep the scratch file, and buffers
        self._loads.clear()
        self._opened.close()

    def _half_of(self, pack: int) -> int:
        return (self._first_half + pack) % 2

    def _next_pack(self) -> None:
        self._current += 1
        begun = time.perf_counter()
        self._bad_in_pack = {}
        load = self._loads.pop(self._current)
        if self._scratch is not None:
            for begin, end, code in load.wait():
                self._lose(begin, end, code)
            self.bytes_read += self._packs[self._current].nbytes
        else:
            self._finished(load.wait(), self._bad_in_pack, resident=self._current == 0)
        pack = self._packs[self._current]
        self._sets = [of.to_set() for of in pack.lists]
        if self._current:
            self._packs[self._current - 1].lists.clear()
        self.seconds["wait"] += time.perf_counter() - begun
        if self._current + 1 < len(self._packs):
            self._load(self._current + 1)

    def _load(self, index: int) -> None:
        """Begin to fill one half of the memory with a pack."""
        pack, half = self._packs[index], self._halves[self._half_of(index)]
        machine = self._machine
        if self._scratch is not None:
            file = len(self._shard_paths)
            self._loads[index] = _core.PackRead(
                self._engine.native, machine.priority, file, pack.at, machine.memory, half, pack.nbytes
            )
            return
        targets = {
            t.name: [(pack.lists[s], machine.memory, half + pack.parts[t.name])]
            for s, space in enumerate(machine.spaces)
            for t in space.tables
        }
        self._loads[index] = self._start_sweep(self._with_resident(targets) if index == 0 else targets, None)

    def _with_resident(self, targets: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if not self._fill_resident:
            return targets
        for s, space in enumerate(self._machine.spaces):
            for t in space.tables:
                part = (
                    _core.RowList.create(self._resident[s]),
                    self._machine.memory,
                    self._resident_parts[t.name],
                )
                targets[t.name].append(part)
        return targets

    def _start_sweep(self, targets: dict[str, list[Any]], writer: Any) -> Any:
        machine, tables, first_file = self._machine, [], 0
        for t in machine.tables:
            tables.append(
                _core.SweepTable(
                    row_count=t.row_count,
                    row_bytes=t.row_bytes,
                    page_bytes=t.page_bytes,
                    rows_per_page=t.rows_per_page,
                    shard_count=len(t.shard_paths),
                    first_file=first_file,
                    checksums=np.asarray(t.checksums()) if machine.check_crc else None,
                    targets=targets[t.name],
                )
            )
            first_file += len(t.shard_paths)
        return _core.Sweep(
            self._engine.native,
            writer,
            machine.priority,
            tables,
            piece_bytes=machine.plan.piece_bytes,
            pieces=PIECES,
            gap_bytes=machine.gap_bytes,
            threads=machine.threads,
        )

    def _lists_of(self, begin: int, end: int) -> list[Any]:
        """The rows of minibatches [begin, end) that are not resident, by space."""
        for of in self._machine.found:
            of.clear()
        for i in range(begin, end):
            for of, rows, resident in zip(
                self._machine.found, self._spool.rows(i), self._resident, strict=True
            ):
                of.insert(rows, resident)
        return [_core.RowList.create(of) for of in self._machine.found]

    def _parts(self, sets: Sequence[Any]) -> tuple[dict[str, int], int]:
        parts, at = {}, 0
        for of, space in zip(sets, self._machine.spaces, strict=True):
            for t in space.tables:
                parts[t.name] = at
                at += align_up(len(of) * t.row_bytes, ALIGNMENT)
        return parts, at

    def _finished(self, result: dict[str, Any], bad: dict[str, list[_BadRows]], *, resident: bool) -> None:
        """Count what a sweep read, and note the pages that it could not read.

        resident: the sweep filled the resident rows, if they had to be filled.
        """
        self.bytes_read += result["bytes_read"]
        first_file = 0
        for s, space in enumerate(self._machine.spaces):
            for t in space.tables:
                shards = len(t.shard_paths)
                files = range(first_file, first_file + shards)
                first_file += shards
                found = [one for one in result["bad_pages"] if one[0] in files]
                if not found:
                    continue
                errors = [read_error(code, self._shard_paths[file], offset) for file, offset, code in found]
                pages = np.array(
                    [offset // t.page_bytes * shards + file - files.start for file, offset, _ in found]
                )
                bad.setdefault(t.name, []).append(_BadRows(pages, t.rows_per_page, errors))
                if resident and self._fill_resident:
                    self._note_resident(s, t, pages, errors)

    def _note_resident(self, s: int, table: Table, pages: np.ndarray, errors: list[StorageError]) -> None:
        """The resident rows of these pages are lost for later superbatches too, which do not read them."""
        rows = (pages[:, None] * table.rows_per_page + np.arange(table.rows_per_page)).ravel()
        of_row = np.repeat(np.arange(len(pages)), table.rows_per_page)
        rows, of_row = rows[rows < table.row_count], of_row[rows < table.row_count]
        others = self._machine.found[s]
        others.clear()
        others.insert(rows.astype(np.uint32), self._resident[s])
        lost = ~np.isin(rows, others.rows())
        if lost.any():
            noted = _BadRows(rows[lost], 1, [errors[i] for i in of_row[lost]])
            self._machine.bad_resident.setdefault(table.name, []).append(noted)

    def _lose(self, begin: int, end: int, code: int) -> None:
        """Note the rows of the current pack in bytes [begin, end), which could not be read from scratch."""
        pack = self._packs[self._current]
        reason = f"cannot read a pack: {os.strerror(code)}"
        error = StorageError(code, reason, self._file.directory, pack.at + begin)
        for s, space in enumerate(self._machine.spaces):
            rows = np.array(pack.lists[s].to_set().rows(), np.uint32)
            for t in space.tables:
                part = pack.parts[t.name]
                first = max(0, begin - part) // t.row_bytes
                last = max(0, end - part + t.row_bytes - 1) // t.row_bytes
                if len(lost := rows[first:last]):
                    noted = _BadRows(lost, 1, [error] * len(lost))
                    self._bad_in_pack.setdefault(t.name, []).append(noted)
