"""AnnexRows: reads the minibatches of a superbatch from its annex. On a GPU, DeviceAnnexRows.

Made by the Packer, once a superbatch is prepared; the caches are freed then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from gids import _core
from gids.cache.device.state import check_memory
from gids.cache.feature_cache import read_error
from gids.cache.output_dtype import Outputs, out_dtype_of, output_bytes, overflow_error
from gids.cuda import on_host
from gids.cuda.device import Consumed
from gids.errors import MemoryBudgetError
from gids.loader.rows import Features, Ids
from gids.loader.superbatch import Packs, Superbatch
from gids.packs.annex import pieces_of
from gids.packs.device_runs import DeviceRuns, OnDevice
from gids.packs.spool import KEPT, rows_of
from gids.sizes import format_bytes
from gids.store import Table
from gids.store.dtypes import make_bools_proper


def divide(
    packs: Packs, superbatch: Superbatch, kept_bytes: Mapping[str, int]
) -> tuple[list[int], dict[str, int]]:
    """(lines by table, bytes by purpose) to read a superbatch; on a GPU, of its memory.

    kept_bytes: host memory that stays taken, by purpose. Raises MemoryBudgetError.
    """
    tables, uses, on = packs.tables, [u.native for u in superbatch.uses], packs.on_device
    forms = Outputs(tables, packs.dtype).forms
    strides = [_core.annex_row_bytes(t.row_bytes) for t in tables]
    longest = [u.longest for u in uses]
    minibatch_bytes = sum(
        output_bytes(n * forms[t.name].out_row_bytes, pinned=packs.pinned)
        for t, n in zip(tables, longest, strict=True)
    )
    if on is None:
        memory_bytes, (pieces, piece_bytes) = packs.memory_bytes, pieces_of(packs.memory_bytes, len(tables))
        purposes = {
            **kept_bytes,
            "outputs": 2 * minibatch_bytes,  # one of them is the consumer's
            "window": KEPT * superbatch.minibatch_bytes,
            "requests": 12 * sum(longest),
            "pieces": pieces * piece_bytes * len(tables),
        }
    else:
        memory_bytes = on.memory_bytes
        runs = sum(n * stride for n, stride in zip(longest, strides, strict=True))
        purposes = {"outputs": 3 * minibatch_bytes, "runs": runs, "requests": 8 * sum(longest)}
    left = memory_bytes - sum(purposes.values())
    if left < 0:
        listing = " + ".join(f"{name} {format_bytes(n)}" for name, n in purposes.items())
        raise MemoryBudgetError(f"{format_bytes(memory_bytes)} are too little for {listing}")
    read = [u.uses * t.row_bytes for t, u in zip(tables, uses, strict=True)]
    lines = [
        min(t.row_count, left * of_table // max(1, sum(read)) // stride)
        for t, of_table, stride in zip(tables, read, strides, strict=True)
    ]
    purposes["lines"] = sum(n * stride for n, stride in zip(lines, strides, strict=True))
    return lines, purposes


class AnnexRows:
    """Reads the minibatches of a superbatch from its annex, in their order.

    Attributes: choice, beside: of the superbatch; next: the minibatch that is read next; end: after the last
    one.
    """

    def __init__(self, packs: Packs, superbatch: Superbatch) -> None:
        self._packs, self._superbatch = packs, superbatch
        self.choice, self.beside = superbatch.choice, superbatch.beside
        self.next, self.end = superbatch.first, superbatch.end
        most = {t.name: uses.native.longest for t, uses in zip(packs.tables, superbatch.uses, strict=True)}
        keep_bytes = superbatch.purposes["outputs"] if packs.on_device is None else 0
        self._outputs = Outputs(
            packs.tables, packs.dtype, keep_bytes=keep_bytes, rows=most, pinned=packs.pinned
        )
        self._memory: list[_core.RunMemory] = []
        self._readers = [self._reader(number) for number in range(len(packs.tables))]

    def _reader(self, number: int) -> _core.RunReader:
        packs, superbatch = self._packs, self._superbatch
        table, on = packs.tables[number], packs.on_device
        memory_bytes = packs.memory_bytes if on is None else 16 * on.staging_bytes
        pieces, piece_bytes = pieces_of(memory_bytes, len(packs.tables))
        memory = _core.RunMemory.create(
            lines=superbatch.lines[number],
            row_bytes=table.row_bytes,
            pieces=pieces,
            piece_bytes=piece_bytes,
            lines_here=on is None,
        )
        self._memory.append(memory)
        annex, planned = packs.annexes[number], superbatch.planned[number]
        return annex.reader(planned, memory, self._outputs.forms[table.name], workers=packs.workers)

    def has(self, t: int) -> bool:
        """Whether it has this minibatch of the epoch."""
        return self.next <= t < self.end

    def gather(self, ids: Ids) -> Features:
        """The rows of the next minibatch, whose ids these are. Blocks.

        Raises StorageError, OverflowError, and RuntimeError if it is not the minibatch that was spooled.
        """
        step, features = self.next - self._superbatch.first, {}
        tables, uses = self._packs.tables, self._superbatch.uses
        for t, of_table, now in zip(tables, uses, rows_of(on_host(ids), tables), strict=True):
            if not of_table.has(step, now):
                raise RuntimeError(
                    f"minibatch {self.next} reads other rows of {t.name!r} than before it was pickled, or in "
                    "another order: let its sampler return objects that pickle faithfully, or use "
                    "reads='random'"
                )
        for number, t in enumerate(tables):
            rows = self._rows(number, t, uses[number].native.count(step))
            if t.name in ids:
                features[t.name] = rows
        self.next += 1
        return features

    def _rows(self, number: int, table: Table, count: int) -> torch.Tensor:
        out = self._outputs.take(table, count)
        self._check(number, *self._read(number, out.numpy()))
        return self._outputs.tensor(table, out)

    def _read(self, number: int, out: Any) -> tuple[int, int, int, bool]:
        return self._readers[number].read(out)

    def _check(self, number: int, code: int, file: int, offset: int, overflowed: bool) -> None:
        packs, table = self._packs, self._packs.tables[number]
        if code:
            self._superbatch.bad = True
            raise read_error(code, packs.scratch.directories[file], offset, " of scratch")
        if overflowed:
            raise overflow_error(table, out_dtype_of(table, packs.dtype))

    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        return {**self._superbatch.purposes, "outputs": self._outputs.peak_bytes}

    def count(self, counters: Counter[str], seconds: dict[str, float]) -> None:
        """Add what was read so far."""
        for number, reader in enumerate(self._readers):
            stats = reader.stats()
            counters["bytes_read"] += stats["bytes_read"]
            counters["minibatches"] += stats["steps"] if number == 0 else 0
            for name in ("wait", "gather"):
                seconds[name] += stats[f"{name}_s"]

    def close(self) -> None:
        """Let reads finish, and free the memory and the scratch."""
        packs = self._packs
        self.count(packs.counted.counters, packs.counted.seconds)
        self._readers.clear()
        self._memory.clear()
        packs.reading = None
        packs.release(self._superbatch)


class DeviceAnnexRows(AnnexRows):
    """The same in the memory of a GPU. Rows are ready for torch's stream that is current in gather()."""

    def __init__(self, packs: Packs, superbatch: Superbatch, on: OnDevice) -> None:
        self._on = on
        check_memory(on.device, superbatch.purposes)
        super().__init__(packs, superbatch)
        self._runs = [
            DeviceRuns(
                on,
                reader,
                memory,
                self._outputs.forms[t.name],
                row_bytes=t.row_bytes,
                longest=uses.native.longest,
            )
            for t, reader, memory, uses in zip(
                packs.tables, self._readers, self._memory, superbatch.uses, strict=True
            )
        ]
        self._consumed = Consumed()  # of torch's stream, when a minibatch was asked for

    def gather(self, ids: Ids) -> Features:
        """As AnnexRows.gather(). Blocks until torch's stream used the minibatch before the last."""
        self._consumed.append(self._on.device.record_current())
        self._consumed.wait()
        return super().gather(ids)

    def _rows(self, number: int, table: Table, count: int) -> torch.Tensor:
        on = self._on
        current = on.device.current_stream()
        with on.device.use(on.stream):
            rows = on.device.empty((count, *table.shape), self._outputs.dtypes[table.name])
        self._check(number, *self._read(number, rows))
        current.wait_event(on.stream.record_event())
        on.device.hand_over(rows, on.stream, current)
        return make_bools_proper(rows)

    def _read(self, number: int, out: torch.Tensor) -> tuple[int, int, int, bool]:
        runs, table = self._runs[number], self._packs.tables[number]
        code, file, offset = runs.read(out)
        if not self._outputs.forms[table.name].narrows:
            return code, file, offset, False
        self._on.stream.synchronize()  # an overflow is raised with its minibatch
        return code, file, offset, runs.overflowed

    def memory(self) -> dict[str, int]:
        return dict(self._superbatch.purposes)

    def close(self) -> None:
        for runs in self._runs:
            runs.close()
        self._runs.clear()
        self._consumed.clear()
        super().close()
