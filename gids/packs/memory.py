"""The memory budget of packs: what a superbatch needs beside the packs themselves, and what is left for them.

Called by the loader before anything is allocated. Knows sizes only. And RowMemory, the memory of resident
rows and packs, with HostRows, the one on the CPU: called by superbatches, which decide what is in memory, and
where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gids import _core
from gids.cache.budget import row_orders
from gids.cache.output_dtype import Bytes, Outputs, overflow_error
from gids.packs.spool import Rows
from gids.store import Table
from gids.store.geometry import align_up, div_ceil

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.store import Table

ALIGNMENT = 4096
"""Of the parts of a pack, in scratch and in memory."""

_MOST_READ_BYTES = 256 << 10
"""Of one request of a sweep or a pack. Longer ones are slower on some disks."""

READS = 32
"""Requests of a sweep or a pack in flight, per disk."""

PIECES = 8
"""Pieces of a sweep that are in memory, per disk."""

_SWEEP_SHARE = 8
"""Pieces and requests take at most 1/8 of the memory, or those of one disk."""

_OUTPUTS = 2
"""One minibatch is with the consumer, one is gathered."""

DEVICE_OUTPUTS = 3
"""One minibatch is gathered, and the consumer's stream uses the two before it."""

_READ_MINIBATCHES = 4
_WRITTEN_MINIBATCHES = 3
"""Sampled ones in memory: one with the consumer and three that are read ahead; those that are written. If no
superbatch is sampled while another is trained, all that sampling needs is where outputs will be."""

_SETS = 4
"""Row sets: the resident rows', the present pack's, one to sweep by, one to collect in."""

_SETS_OF_A_TRIAL = 2
"""The resident rows', and those of the pack that is filled."""

_DEVICE_SETS = 3
"""Row sets on a device: of the resident rows and of two packs."""

_DEVICE_MINIBATCHES = 4
"""On a device: one is sampled, one goes to the spool, one comes from there, one is with the consumer."""

SENT = 2
"""Minibatches whose row numbers are on their way to the device."""

_MOST_STAGING = 64 << 20
_LEAST_STAGING = 256 << 10
_STAGING_SHARE = 32
"""Pinned memory that packs pass on their way to a device takes at most a 32nd of the host memory."""

_STAGED_DISKS = 4
"""The most staging has room for what is in flight on four disks, and grows with their number."""

ON_DEVICE = ("packs", "outputs", "row sets on the device", "rows on the device", "minibatches on the device")
"""The purposes in device memory, if packs are there. All others are in host memory."""

_MOST_LISTS_SHARE = 4
_LEAST_LISTS_SHARE = 32
"""Row lists of a superbatch take 1/32 to 1/4 of the memory for packs."""

_PIECE_SHARE = 512
"""A piece of a sweep takes at most 1/512 of the memory."""

_WRITE_SHARE = 16
"""Write buffers beside minibatches that are trained take 1/16 of the memory."""

_LEAST_BUFFER_BYTES = 32 << 10
_MOST_BUFFER_BYTES = 1 << 20
_LEAST_PACKS = 4
_MOST_PACKS = 2048
SPARE_BUFFERS = 16
"""Write buffers beside the one of each pack: those that are being written."""

_LEAST_WRITE_BYTES = (_LEAST_PACKS + SPARE_BUFFERS) * _LEAST_BUFFER_BYTES
_MOST_WRITE_BYTES = (_MOST_PACKS + SPARE_BUFFERS) * _MOST_BUFFER_BYTES
"""Write buffers take at least, and at most, as much."""


@dataclass(frozen=True)
class PackPlan:
    """How memory is shared out.

    purposes: bytes by purpose, "packs" among them. overlap: a superbatch is made while another is trained.
    Else a sweep uses memory that packs and outputs need only later. trials: cuts that may be tried at a time.
    piece_bytes, read_bytes: of a piece of a sweep, and of a request. disks: that it keeps busy.
    staging_bytes: pinned host memory that packs pass on their way to a device; 0 if they are on the host. On
    a device, "packs" has no row lists and no write buffers.
    """

    purposes: Mapping[str, int]
    overlap: bool
    trials: int
    piece_bytes: int
    read_bytes: int
    disks: int
    staging_bytes: int = 0

    @property
    def pack_bytes(self) -> int:
        """For the resident rows, two packs, and the row lists of packs that wait."""
        return self.purposes["packs"]

    def beside_bytes(self, lists_bytes: int) -> int:
        """For a superbatch of a next epoch, whose row lists take so many bytes."""
        return lists_bytes + sum(self.purposes[name] for name in ("write buffers", "row sets", "sweep"))

    def rows_bytes(self, lists_bytes: int) -> int:
        """For resident rows and two packs, if the row lists of a superbatch take so many bytes."""
        if "row lists" in self.purposes:
            return self.pack_bytes
        return self.pack_bytes - (2 if self.overlap else 1) * lists_bytes

    def lists_bytes(self, wanted_bytes: int) -> int:
        """For the row lists of a superbatch, whose packs want so many or fewer."""
        if "row lists" in self.purposes:
            return self.purposes["row lists"] // (2 if self.overlap else 1)
        most = self.pack_bytes // _MOST_LISTS_SHARE
        return max(self.pack_bytes // _LEAST_LISTS_SHARE, min(wanted_bytes + wanted_bytes // 8, most))

    def write_bytes(self, half_bytes: int, outputs_bytes: int = 0) -> int:
        """For the write buffers of a sweep. half_bytes: of one pack. outputs_bytes: that are in use."""
        if "write buffers" in self.purposes:
            return self.purposes["write buffers"]
        return 2 * half_bytes + max(0, self.purposes["outputs"] - outputs_bytes)

    def most_packs(self, write_bytes: int) -> int:
        """Packs that one sweep can fill."""
        return max(_LEAST_PACKS, min(_MOST_PACKS, write_bytes // _LEAST_BUFFER_BYTES - SPARE_BUFFERS))

    def buffers(self, packs: int, write_bytes: int) -> tuple[int, int]:
        """(number, bytes of each) of the write buffers for so many packs."""
        count = packs + SPARE_BUFFERS
        each = write_bytes // count // ALIGNMENT * ALIGNMENT
        return count, min(_MOST_BUFFER_BYTES, max(_LEAST_BUFFER_BYTES, each))


@dataclass(frozen=True, kw_only=True)
class PackBudget:
    """What packs may take.

    output_row_bytes: bytes of an output row, by table. bounce_bytes: memory of the loader's engine.
    sampler_bytes: of the sampler, until all is sampled. waiting: sampled minibatches that the source holds.
    memory_bytes: of the host. disks: number of disks that hold the tables. device_bytes: of the device, if
    packs are there.
    """

    tables: Sequence[Table]
    output_row_bytes: Mapping[str, int]
    bounce_bytes: int
    sampler_bytes: int
    waiting: int
    memory_bytes: int
    disks: int = 1
    device_bytes: int | None = None

    def share(self, rows: Mapping[str, int], minibatch_bytes: int, overlap: bool) -> PackPlan | None:
        """Give every purpose its bytes; the rest is for packs. None if nothing is left.

        rows: rows that the largest minibatch reads, by table. minibatch_bytes: its memory.
        """
        purposes = self.needed(rows, minibatch_bytes, overlap)
        there = {} if self.device_bytes is None else {p: n for p, n in purposes.items() if p in ON_DEVICE}
        left = self.memory_bytes - sum(purposes.values()) + sum(there.values())
        if self.device_bytes is None:
            # The first superbatch is counted and cut before there are outputs and packs.
            purposes["packs"], for_trials = left, left + purposes["outputs"] - self._counts_bytes
        else:
            lists_bytes, write_bytes = left // 2, left - left // 2
            most_bytes = (2 if overlap else 1) * _MOST_PACKS * sum(t.row_count for t in self.tables)
            purposes |= {
                "row lists": min(lists_bytes, most_bytes),  # a byte for each row of a table is the most
                "write buffers": min(write_bytes, _MOST_WRITE_BYTES),
            }
            purposes["packs"] = self.device_bytes - sum(there.values())
            for_trials = write_bytes if write_bytes >= _LEAST_WRITE_BYTES else 0  # tried before writing
        trials = for_trials // (_SETS_OF_A_TRIAL * max(1, self._set_bytes))
        if purposes["packs"] <= 0 or trials <= 0:
            return None
        return PackPlan(
            purposes,
            overlap=overlap,
            trials=trials,
            piece_bytes=self._piece_bytes,
            read_bytes=self._read_bytes,
            disks=self._busy_disks,
            staging_bytes=self.staging_bytes,
        )

    def needed(self, rows: Mapping[str, int], minibatch_bytes: int, overlap: bool) -> dict[str, int]:
        """Bytes by purpose, without packs; on a device, without row lists and write buffers."""
        outputs_bytes = _OUTPUTS * self._output_bytes(rows)
        each_bytes, sampler_bytes = minibatch_bytes + 4 * sum(rows.values()), self.sampler_bytes
        minibatches, sampled = _READ_MINIBATCHES, _WRITTEN_MINIBATCHES + 1 + self.waiting
        if overlap:
            minibatches = max(minibatches + _WRITTEN_MINIBATCHES, 2 + self.waiting) + 1 + self.waiting
        else:  # sampled where outputs will be
            sampler_bytes += (sampled - minibatches) * each_bytes - outputs_bytes
        purposes = {
            "bounce pool": self.bounce_bytes,
            "sampler": max(0, sampler_bytes),
            "outputs": outputs_bytes,
            "minibatches": minibatches * each_bytes,
            "row sets": (_SETS + (_SETS_OF_A_TRIAL if overlap else 0)) * self._set_bytes,
            "sweep": (2 if overlap else 1) * self._busy_disks * self._disk_bytes,
            **row_orders(self.tables),
        }
        if self.device_bytes is not None:
            sent_bytes = SENT * 4 * sum(rows.values())
            return purposes | {
                "counts": self._counts_bytes,
                "staging": self.staging_bytes + sent_bytes,
                "outputs": DEVICE_OUTPUTS * self._output_bytes(rows),
                "row sets on the device": _DEVICE_SETS * self._set_bytes,
                "rows on the device": sent_bytes,
                "minibatches on the device": _DEVICE_MINIBATCHES * minibatch_bytes,
            }
        if overlap:
            purposes["counts"] = self._counts_bytes
            purposes["write buffers"] = min(
                _MOST_WRITE_BYTES, max(self.memory_bytes // _WRITE_SHARE, _LEAST_WRITE_BYTES)
            )
        return purposes

    @property
    def _busy_disks(self) -> int:
        return max(1, min(self.disks, self.memory_bytes // _SWEEP_SHARE // self._disk_bytes))

    @property
    def staging_bytes(self) -> int:
        """Pinned host memory that packs pass on their way to a device."""
        if self.device_bytes is None:
            return 0
        share = max(_LEAST_STAGING, self.memory_bytes // _STAGING_SHARE)
        most = _MOST_STAGING * max(1, div_ceil(self._busy_disks, _STAGED_DISKS))
        return align_up(min(most, share), ALIGNMENT)

    @property
    def _disk_bytes(self) -> int:
        """Of a sweep, per disk."""
        return PIECES * self._piece_bytes + READS * self._read_bytes

    @property
    def _set_bytes(self) -> int:
        return sum(_core.row_set_bytes(t.row_count) for t in self.tables)

    @property
    def _counts_bytes(self) -> int:
        """Two bytes for each row and page, and the set of a minibatch that is counted."""
        pages = sum(t.page_count for t in self.tables if t.rows_per_page > 1)
        return 2 * (pages + sum(t.row_count for t in self.tables)) + self._set_bytes

    @property
    def _piece_bytes(self) -> int:
        return align_up(min(1 << 20, max(64 << 10, self.memory_bytes // _PIECE_SHARE)), self._longest_page)

    @property
    def _read_bytes(self) -> int:
        return max(self._longest_page, min(_MOST_READ_BYTES, align_up(self._piece_bytes // 4, ALIGNMENT)))

    @property
    def _longest_page(self) -> int:
        return max(t.page_bytes for t in self.tables)

    def _output_bytes(self, rows: Mapping[str, int]) -> int:
        return sum(
            ALIGNMENT * max(1, div_ceil(rows.get(t.name, 0) * self.output_row_bytes[t.name], ALIGNMENT))
            for t in self.tables
        )


Bad = tuple[int, int]
"""The first byte of an extent of the scratch file that could not be read, and the errno."""


class Extent(NamedTuple):
    """A part of the scratch file, and where it goes in the memory."""

    offset: int
    at: int
    nbytes: int


class Wanted(NamedTuple):
    """Rows of a table that a minibatch reads. holders: (row set, where its rows begin in the memory) of the
    resident rows and of the pack, or of another pack with a part of the rows; the sets are those of keep()
    and load()."""

    table: Table
    rows: Rows
    holders: tuple[tuple[Any, int], ...]


class Load(Protocol):
    """A pack on its way from scratch to memory."""

    def wait(self) -> tuple[list[Any], list[Bad]]:
        """The row set of each table, and what could not be read. Blocks until the pack is in memory."""

    def close(self) -> None:
        """Stop it. Idempotent. Blocks for one read at most."""


class PackSource(NamedTuple):
    """A scratch file to read packs from. files: which of the engine's are those of the scratch file."""

    engine: Engine
    priority: _core.Priority
    files: range


class RowMemory(ABC):
    """Attributes: swept: memory that a sweep can write rows to; None if rows come from scratch only."""

    swept: _core.PackMemory | None

    @property
    @abstractmethod
    def peak_output_bytes(self) -> int: ...

    def lend_outputs(self) -> int:
        """Free the outputs that nobody uses, for a sweep. Returns the bytes of the others."""
        return 0

    @abstractmethod
    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        """Begin to read a pack. Does not block. lists: its rows in each table. half: 0 or 1."""

    @abstractmethod
    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        """Row sets of the resident rows."""

    @abstractmethod
    def discard(self, at: int, nbytes: int) -> None:
        """Lend these bytes to a sweep until they are written again. Their contents are lost."""

    @abstractmethod
    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        """The rows of a minibatch in the order in which it reads them, by table, ready for torch.

        parts: of each pack with rows of the minibatch. Its rows are copied before the next part is asked for.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. No load and no sweep is going on."""


class HostRows(RowMemory):
    """threads: that copy rows. output_rows: that an output has room for, by table."""

    def __init__(
        self,
        tables: Sequence[Table],
        plan: PackPlan,
        *,
        threads: int,
        output_dtype: torch.dtype | None,
        output_rows: Mapping[str, int],
    ) -> None:
        self._outputs_bytes = plan.purposes["outputs"]
        self._outputs = Outputs(tables, output_dtype, keep_bytes=self._outputs_bytes, rows=output_rows)
        self._workers = _core.Workers.create(threads)
        self.swept = _core.PackMemory.create(plan.pack_bytes)

    @property
    def peak_output_bytes(self) -> int:
        return self._outputs.pool.peak_bytes

    def lend_outputs(self) -> int:
        pool = self._outputs.pool
        pool.keep(0)
        pool.keep(self._outputs_bytes)
        return pool.taken_bytes

    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        files, memory = source.files, self.memory
        reads = [
            _core.PackRead(
                source.engine.native, source.priority, files[0], offset, memory, at, nbytes, files=len(files)
            )
            for offset, at, nbytes in extents
        ]
        return _HostLoad(reads, extents, lists)

    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        return list(resident)

    def discard(self, at: int, nbytes: int) -> None:
        self.memory.discard(at, nbytes)

    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        memory = self.memory
        outputs: dict[str, tuple[Table, Bytes]] = {}
        missing: Counter[str] = Counter()
        for wanted in parts:
            for table, rows, holders in wanted:
                if table.name not in outputs:
                    outputs[table.name] = (table, self._outputs.take(table, len(rows)))
                    missing[table.name] = len(rows)
                form = self._outputs.forms[table.name]
                left, overflowed = _core.gather_packed(
                    self._workers,
                    rows,
                    [(rows_of_pack, memory, at) for rows_of_pack, at in holders],
                    row_bytes=table.row_bytes,
                    stored_as=form.stored_as,
                    wanted_as=form.wanted_as,
                    row_values=form.values,
                    scales=form.scales,
                    out=outputs[table.name][1],
                )
                if overflowed:
                    raise overflow_error(table, self._outputs.dtypes[table.name])
                missing[table.name] -= len(rows) - left
        if any(missing.values()):
            raise AssertionError(f"rows are in no pack, or in two: {dict(missing)}")
        return {name: self._outputs.tensor(*output) for name, output in outputs.items()}

    def close(self) -> None:
        """See RowMemory.close(). Features in use keep their memory, as does a gather in another thread."""
        self.swept = None
        self._outputs.pool.keep(0)

    @property
    def memory(self) -> _core.PackMemory:
        """Of the resident rows and packs. Raises ValueError after close()."""
        if self.swept is None:
            raise ValueError("this loader is closed: make a new one")
        return self.swept


class _HostLoad:
    def __init__(
        self, reads: list[_core.PackRead], extents: Sequence[Extent], lists: Sequence[_core.RowList]
    ) -> None:
        self._reads, self._extents, self._lists = reads, extents, lists

    def wait(self) -> tuple[list[Any], list[Bad]]:
        bad = [
            (extent.offset + begin, code)
            for read, extent in zip(self._reads, self._extents, strict=True)
            for begin, _, code in read.wait()
        ]
        return [rows.to_set() for rows in self._lists], bad

    def close(self) -> None:
        self._reads.clear()  # the end of a PackRead cancels it
