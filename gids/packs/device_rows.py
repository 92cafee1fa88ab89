"""DeviceRows: resident rows and packs in the memory of a GPU. Kernels gather minibatches from them.

Made by PackChooser, used by superbatches. Threads read packs from scratch through pinned staging, on a
stream of their own. Kernels run on one stream; each minibatch is handed over to torch's current stream.
OnDevice: copies what was sampled there. Made by FeatureLoader.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.state import HostArray, check_memory, row_copy
from gids.cache.output_dtype import out_dtype_of, overflow_error, row_form
from gids.cuda.device import CACHE_PRIORITY, MadeOn, on_host
from gids.cuda.host_memory import prefer_node
from gids.packs.memory import (
    ALIGNMENT,
    DEVICE_OUTPUTS,
    ON_DEVICE,
    SENT,
    Bad,
    Extent,
    Load,
    PackPlan,
    PackSource,
    RowMemory,
    Wanted,
)
from gids.packs.spool import Rows
from gids.store.dtypes import make_bools_proper

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event, Stream
    from gids.cuda.device import Mapping as HostMapping
    from gids.store import Table

STAGING_PARTS = 4
"""One part is copied to the device while the others are read."""

Stopped = Callable[[], bool]

_UNIT = "packs/gather_packed.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_WAVES = 4  # blocks per multiprocessor; see the launch bounds of the kernel


class DeviceSet:
    """A RowSet in device memory."""

    def __init__(self, device: Device, row_count: int) -> None:
        words = -(-row_count // 64)
        self.words = device.empty((words,), torch.int64)
        self.ranks = device.empty((words,), torch.int32)

    def fill(self, rows: _core.RowSet, staging: Staging) -> None:
        """Blocks. No kernel that uses the set is enqueued."""
        staging.write(rows.words(), self.words)
        staging.write(rows.ranks(), self.ranks)

    def free(self) -> None:
        self.words = self.ranks = torch.empty(0)


class Staging:
    """Pinned host memory that packs and row sets pass on their way to the device. One transfer at a time.

    Attributes: stream: of the copies.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._part_bytes = max(1, nbytes // STAGING_PARTS // ALIGNMENT) * ALIGNMENT
        self._memory = _core.PackMemory.create(STAGING_PARTS * self._part_bytes)
        self._bytes = self._memory.bytes()
        self._address: int = self._bytes.ctypes.data
        prefer_node(self._address, self._memory.nbytes, device.numa_node)
        self.mapping = device.map_host(self._address, self._memory.nbytes, memory=self._memory)
        self.stream = device.new_stream()
        self._copied: list[Event | None] = [None] * STAGING_PARTS
        self._lock = threading.Lock()

    def read(
        self, source: PackSource, extents: Sequence[Extent], to: torch.Tensor, stopped: Stopped
    ) -> list[Bad]:
        """Read extents of a scratch file to the device. Blocks. Returns what could not be read.

        Incomplete once stopped() is true. to: uint8[n] on the device, which no other stream uses.
        """
        bad: list[Bad] = []
        reads: deque[tuple[_core.PackRead, int, Extent]] = deque()

        def finish() -> None:
            read, part, (offset, at, nbytes) = reads.popleft()
            bad.extend((offset + begin, code) for begin, _, code in read.wait())
            self._copy(part, to[at : at + nbytes])

        with self._lock:
            for i, piece in enumerate(_pieces(extents, self._part_bytes)):
                if stopped():
                    break
                if len(reads) == STAGING_PARTS - 1:
                    finish()
                part = i % STAGING_PARTS
                self._wait_for(part)
                begin = part * self._part_bytes
                where = piece.offset, self._memory, begin, piece.nbytes
                engine, priority, files = source
                read = _core.PackRead(engine.native, priority, files[0], *where, files=len(files))
                reads.append((read, part, piece))
            while reads and not stopped():
                finish()
            reads.clear()  # which cancels those that were not waited for
            self.stream.synchronize()
        return bad

    def write(self, array: npt.NDArray[Any], to: torch.Tensor) -> None:
        """Copy an array to the device. Blocks. to: contiguous, of as many bytes, used by no other stream."""
        source, flat = array.view(np.uint8), to.view(torch.uint8)
        with self._lock:
            for i, first in enumerate(range(0, len(source), self._part_bytes)):
                piece, part = source[first : first + self._part_bytes], i % STAGING_PARTS
                self._wait_for(part)
                begin = part * self._part_bytes
                self._bytes[begin : begin + len(piece)] = piece
                self._copy(part, flat[first : first + len(piece)])
            self.stream.synchronize()

    def _wait_for(self, part: int) -> None:
        """Until the part was copied."""
        event = self._copied[part]
        if event is not None:
            event.synchronize()

    def _copy(self, part: int, to: torch.Tensor) -> None:
        self._device.copy_from_host(self.stream, to, self._address + part * self._part_bytes)
        self._copied[part] = self.stream.record_event()


class DeviceLoad:
    """See gids.packs.memory.Load. work: called in a thread; returns what wait() returns."""

    def __init__(self, device: Device, work: Callable[[Stopped], tuple[list[Any], list[Bad]]]) -> None:
        self._device = device
        self._stop = threading.Event()
        self._result: tuple[list[Any], list[Bad]] = ([], [])
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="gids-pack-load", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Stopped], tuple[list[Any], list[Bad]]]) -> None:
        try:
            self._device.beside_captures()
            self._result = work(self._stop.is_set)
        except BaseException as error:
            self._error = error.with_traceback(None)

    def wait(self) -> tuple[list[Any], list[Bad]]:
        """See Load.wait(). Raises what the device raised, and ValueError after close()."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise ValueError("this loader is closed: make a new one")
        return self._result

    def close(self) -> None:
        """See Load.close()."""
        self._stop.set()
        self._thread.join()


def _pieces(extents: Sequence[Extent], most_bytes: int) -> Iterator[Extent]:
    for offset, at, nbytes in extents:
        for first in range(0, nbytes, most_bytes):
            yield Extent(offset + first, at + first, min(most_bytes, nbytes - first))


class OnDevice:
    """memory_bytes: of the device, for packs and outputs. Lasts as long as the loader."""

    def __init__(self, device: Device, memory_bytes: int) -> None:
        self.device, self.memory_bytes = device, memory_bytes
        self._stream = device.new_stream()
        self._complete = False  # the minibatch whose ids were copied last

    def ids_on_host(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ids of a minibatch on the CPU. Blocks until they are there.

        Tables that have the same tensor have the same copy.
        """
        self._complete = isinstance(ids, MadeOn)
        return on_host(ids)

    def spooling(self) -> AbstractContextManager[object]:
        """A context in which torch copies tensors of the minibatch whose ids were copied last to the host.

        It waits for training only if the minibatch was made on torch's current stream, as training is.
        """
        if not self._complete:
            self._stream.wait_stream(self.device.current_stream())
        return self.device.use(self._stream)

    def settle(self) -> None:
        """Wait for torch's current stream, on which minibatches come from the spool."""
        self.device.current_stream().synchronize()


class DeviceRows(RowMemory):
    """output_rows: of the largest minibatch, by table. Raises MemoryBudgetError if the device has less free
    memory than the plan needs there."""

    swept = None

    def __init__(
        self,
        device: Device,
        tables: Sequence[Table],
        plan: PackPlan,
        *,
        output_dtype: torch.dtype | None,
        output_rows: Mapping[str, int],
    ) -> None:
        check_memory(device, {purpose: n for purpose, n in plan.purposes.items() if purpose in ON_DEVICE})
        self.device = device
        self.stream: Stream = device.new_stream(CACHE_PRIORITY)
        """The stream of all kernels."""
        device.preload(_UNIT)
        self._dtypes: dict[str, torch.dtype] = {}
        self._row_copies: dict[str, tuple[int | torch.Tensor, ...]] = {}
        self._tables, self._narrows = list(tables), False
        with device.use(self.stream):
            self.memory = device.allocate(plan.pack_bytes // ALIGNMENT * ALIGNMENT)
            self._resident, *self._halves = (
                [DeviceSet(device, t.row_count) for t in tables] for _ in range(3)
            )
            for t in tables:
                form = row_form(t, output_dtype)
                scales: int | torch.Tensor = 0
                if form.scales is not None:
                    scales = torch.from_numpy(form.scales).to(device.torch_device)
                self._dtypes[t.name] = out_dtype_of(t, output_dtype)
                self._row_copies[t.name] = (*row_copy(form), scales)
                self._narrows |= form.narrows
        self._kept: Sequence[_core.RowSet] | None = None
        self._staging = Staging(device, plan.staging_bytes)
        self._most_rows = most_rows = sum(output_rows.values())
        self._numbers = HostArray(device, 4 * SENT * most_rows)
        self._sent: deque[Event] = deque()
        self._turn = 0
        self._fault = HostArray(device, 8 * (1 + len(tables)))  # a row in no pack; overflow of each table
        self._consumed: deque[Event] = deque()  # of torch's stream, when a minibatch was asked for
        self._output_bytes: deque[int] = deque(maxlen=DEVICE_OUTPUTS)  # of the last minibatches
        self._peak_output_bytes = 0
        mapped: list[HostArray | HostMapping] = [self._numbers, self._fault, self._staging.mapping]
        loads: weakref.WeakSet[DeviceLoad] = weakref.WeakSet()
        streams = [self._staging.stream, self.stream]
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _release, self._pid, loads, streams, mapped)
        self.loads = loads
        """The loads that may be running."""

    @property
    def peak_output_bytes(self) -> int:
        return self._peak_output_bytes

    def load(
        self, source: PackSource, extents: Sequence[Extent], lists: Sequence[_core.RowList], half: int
    ) -> Load:
        before = self.stream.record_event()  # the kernels that read the half's last pack are enqueued

        def work(stopped: Stopped) -> tuple[list[Any], list[Bad]]:
            before.synchronize()
            bad = self._staging.read(source, extents, self.memory, stopped)
            return ([], bad) if stopped() else (self.fill_half(half, lists), bad)

        load = DeviceLoad(self.device, work)
        self.loads.add(load)
        return load

    def keep(self, resident: Sequence[_core.RowSet]) -> list[Any]:
        if self._kept is not resident:
            self.stream.synchronize()
            for there, rows in zip(self._resident, resident, strict=True):
                there.fill(rows, self._staging)
            self._kept = resident
        return list(self._resident)

    def discard(self, at: int, nbytes: int) -> None:
        """A sweep uses none of the device's memory."""

    def fill_half(self, half: int, lists: Sequence[_core.RowList]) -> list[DeviceSet]:
        """The row sets of the pack in this half. Blocks. Called by its load."""
        for there, rows in zip(self._halves[half], lists, strict=True):
            there.fill(rows.to_set(), self._staging)
        return list(self._halves[half])

    def gather(self, parts: Iterable[Sequence[Wanted]]) -> dict[str, torch.Tensor]:
        """See RowMemory.gather(). There is one part. Blocks until the consumer's stream used the minibatch
        before the last.
        """
        (wanted,) = parts
        self._check_fault()
        current = self.device.current_stream()
        self._consumed.append(current.record_event())
        while len(self._consumed) > 1:
            self._consumed.popleft().synchronize()
        outputs: dict[str, torch.Tensor] = {}
        with self.device.use(self.stream):
            numbers = self._send({one.table.name: one.rows for one in wanted})
            for one in wanted:
                out = self.device.empty((len(one.rows), *one.table.shape), self._dtypes[one.table.name])
                self._launch(one, numbers[one.table.name], out)
                outputs[one.table.name] = out
        current.wait_event(self.stream.record_event())
        if self._narrows:  # an overflow is raised with its minibatch
            self.stream.synchronize()
            self._check_fault()
        for out in outputs.values():
            self.device.hand_over(out, self.stream, current)
        self._output_bytes.append(sum(out.nbytes for out in outputs.values()))
        self._peak_output_bytes = max(self._peak_output_bytes, sum(self._output_bytes))
        return {name: make_bools_proper(out) for name, out in outputs.items()}

    def close(self) -> None:
        """See RowMemory.close(). Waits for the kernels. Does nothing in a forked child."""
        if self._end.alive and os.getpid() == self._pid:
            self._end()
            self.memory = torch.empty(0, dtype=torch.uint8)
            for row_sets in [self._resident, *self._halves]:
                for row_set in row_sets:
                    row_set.free()
            self._row_copies.clear()
            self._consumed.clear()
            self._check_fault()

    def _send(self, arrays: Mapping[str, Rows]) -> dict[str, torch.Tensor]:
        """Row numbers, copied to the device on the stream: int32[n] each, of the same bits."""
        total = sum(map(len, arrays.values()))
        assert total <= self._most_rows, "the minibatch is larger than those that memory is shared out for"
        sent = self.device.empty((total,), torch.int32)
        if len(self._sent) == SENT:
            self._sent.popleft().synchronize()
        first = 4 * self._most_rows * (self._turn % SENT)
        self._turn += 1
        staged = self._numbers.bytes[first : first + 4 * total].view(np.uint32)
        by_table, at = {}, 0
        for name, rows in arrays.items():
            staged[at : at + len(rows)] = rows
            by_table[name] = sent[at : at + len(rows)]
            at += len(rows)
        if total:
            address = self._numbers.bytes.ctypes.data + first
            self.device.copy_from_host(self.stream, sent, address)
        self._sent.append(self.stream.record_event())
        return by_table

    def _launch(self, one: Wanted, numbers: torch.Tensor, out: torch.Tensor) -> None:
        (resident, resident_at), (pack, pack_at) = one.holders
        base = self.memory.data_ptr()
        self.device.launch(
            self.stream,
            _UNIT,
            "gids_gather_packed",
            min(-(-len(numbers) // _WARPS), _WAVES * self.device.sm_count),
            _THREADS,
            resident.words,
            resident.ranks,
            base + resident_at,
            pack.words,
            pack.ranks,
            base + pack_at,
            numbers,
            len(numbers),
            one.table.row_count,
            one.table.row_bytes,
            out,
            *self._row_copies[one.table.name],
            self._fault.address + 8 * (1 + self._tables.index(one.table)),
            self._fault.address,
        )

    def _check_fault(self) -> None:
        """Raise AssertionError if a kernel that has run found a row in no pack, OverflowError if a finite
        value became infinite."""
        fault, *overflowed = self._fault.bytes.view(np.uint64).tolist()
        self._fault.bytes[:] = 0  # raised once
        if fault:
            raise AssertionError(f"row {fault - 1} of a minibatch is in no pack")
        for table, over in zip(self._tables, overflowed, strict=True):
            if over:
                raise overflow_error(table, self._dtypes[table.name])


def _release(
    pid: int,
    loads: weakref.WeakSet[DeviceLoad],
    streams: list[Stream],
    mapped: list[HostArray | HostMapping],
) -> None:
    """End the loads, wait for the streams, unmap. A forked child owns none of these."""
    if os.getpid() != pid:
        return
    for load in list(loads):  # when the interpreter ends; else they are closed
        load.close()
    try:
        for stream in streams:
            stream.synchronize()
    finally:
        for one in mapped:
            one.close()
