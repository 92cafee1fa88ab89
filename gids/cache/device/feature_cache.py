"""DeviceFeatureCache: the software cache in device memory. Kernels post the requests that fill it.

Called by the loader instead of FeatureCache, with the same steps in the same order. It enqueues kernels:
native/cache/device_cache_plan.cu chooses the pages that stay; native/cache/device_cache_rows.cu copies rows.

All kernels run on one stream of the cache, in the order of the calls, so that no two overlap. The host
waits in gather() for the step's rows. Before plan() and gather() it also waits for the number of pages that
a planned step misses, which has usually arrived by then.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.kernels import CacheKernels, Plan
from gids.cache.device.reads import Reads, preload
from gids.cache.device.state import (
    THROUGH,
    Counters,
    HostArray,
    MissPool,
    TableState,
    check_memory,
    line_bytes,
)
from gids.cache.feature_cache import FeatureCache, check_ids
from gids.cache.output_dtype import overflow_error
from gids.cuda.device import CACHE_PRIORITY, Consumed, MadeOn, on_host
from gids.io.device.device_queue import DeviceQueue, QueueTable
from gids.profiling import stage
from gids.store.dtypes import make_bools_proper

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event, Stream
    from gids.io import Engine
    from gids.io.device.kvikio_reader import KvikioReader
    from gids.store import Table


@dataclass
class _Step:
    """A minibatch from enter() to retire()."""

    number: int
    ids: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    """The row positions of ids: the ids themselves, except in tables that have an order."""
    planned: bool = False
    plans: list[Plan] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    counted: Event | None = None  # after it the host sees the number of missing pages
    settled: bool = False  # all its rounds are posted
    done: Event | None = None  # after it the outputs hold its rows
    accounted: bool = False

    @property
    def index(self) -> int:
        return self.number % _core.USE_BITS

    @property
    def bit(self) -> int:
        return 1 << self.index


class DeviceFeatureCache:
    """Cache lines of several tables in device memory and, below it, in host memory.

    Args:
        device: from :func:`gids.cuda.open_device`.
        engine: opened on the shards of all tables, in order.
        lines: number of cache lines in device memory, by table.
        heats: uint8[page_count], by table; tables without heat are left out.
        host_lines: number of further lines in pinned host memory, which kernels read over the bus.
        policy: "lookahead", "window-pin", "random" or "static".
        host_policy: "lookahead" replaces lines in host memory like the others; "static" fills them once with
            the hottest pages that have no line in device memory.
        output_dtype: float32, float16 or bfloat16, for tables of these dtypes and of int8 with a scale. None:
            the stored dtype; float32 for int8 with a scale.
        check_crc: compare every page that is read with its checksum.
        staging_bytes: see :class:`gids.io.device.device_queue.DeviceQueue`.
        kvikio: reads long runs of the preloaded pages. The engine reads the others, or without it all.
        preload_hottest: fill lines with the hottest pages at construction.

    After construction, device memory is allocated only for ids and outputs, which torch caches, and for the
    missing pages of a minibatch that is larger than any before.

    Raises ValueError for a wrong number of lines, MemoryBudgetError if the cache does not fit in the
    free memory of the device.
    """

    def __init__(
        self,
        device: Device,
        engine: Engine,
        tables: Sequence[Table],
        *,
        lines: Mapping[str, int],
        heats: Mapping[str, npt.NDArray[np.uint8]],
        host_lines: Mapping[str, int] | None = None,
        policy: str = "lookahead",
        host_policy: str = "lookahead",
        output_dtype: torch.dtype | None = None,
        check_crc: bool = False,
        staging_bytes: int = 256 << 20,
        kvikio: KvikioReader | None = None,
        preload_hottest: bool = True,
    ) -> None:
        near = {t.name: lines[t.name] for t in tables}
        far = {t.name: (host_lines or {}).get(t.name, 0) for t in tables}
        self._fixed_bytes = dict(line_bytes(tables, near, far))
        check_memory(device, self._fixed_bytes)

        self.tables = {t.name: t for t in tables}
        self.stream: Stream = device.new_stream(CACHE_PRIORITY)
        """The stream of all kernels. Ids made on it need no wait."""
        self._device = device
        self._kernels = CacheKernels(device, self.stream)
        none = dict.fromkeys(near, 0)
        self._host = FeatureCache(
            engine, tables, lines=none, heats={}, check_crc=check_crc, output_dtype=output_dtype
        )
        queue_tables = _queue_tables(tables, check_crc)
        self._queue = DeviceQueue(
            device, engine, queue_tables, stream=self.stream, staging_bytes=staging_bytes
        )
        mapped: list[HostArray] = []
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _release, self._pid, self._queue, self.stream, mapped)
        self._states: dict[str, TableState] = {}
        with device.use(self.stream):
            self._counters = Counters(device, self._kernels, list(near))
            mapped.append(self._counters.shown)
            self._reads = Reads(self._queue, self._kernels, self._counters)
            for number, t in enumerate(tables):
                kept = far[t.name] if host_policy == "static" else 0
                state = TableState(
                    device,
                    t,
                    number=number,
                    lines=near[t.name],
                    host_lines=far[t.name],
                    replaced=near[t.name] + far[t.name] - kept,
                    policy=policy,
                    heat=heats.get(t.name),
                    output_dtype=output_dtype,
                )
                mapped.append(state.far)
                self._states[t.name] = state
                if preload_hottest:
                    in_files, heat = queue_tables[number], heats.get(t.name)
                    preload(device, state, engine, in_files, heat=heat, kvikio=kvikio)
        self._pools = {t.name: MissPool(device, self._kernels, t.page_count) for t in tables}

        self.next_step = 0
        """The first step that a new stream may enter; steps never repeat."""
        self._entered = self._planned = self._gathered = self._retired = 0
        self._planned_mask = 0
        self._steps: dict[int, _Step] = {}  # live
        self._flights: deque[_Step] = deque()  # planned steps whose last gather is not enqueued
        self._consumed = Consumed()  # of the consumer's streams, when rows were returned to it
        self._usual_rounds = dict.fromkeys(near, 1)
        self._seconds = dict.fromkeys(("enter_s", "plan_s", "wait_s", "gather_s", "retire_s"), 0.0)

    # --- steps ---

    def enter(self, step: int, ids: Mapping[str, torch.Tensor]) -> None:
        """Mark the pages that minibatch `step` will read. Steps enter in order. Does not block.

        ids: int64[n] by table, on this device or on the CPU, may repeat. On the device they must not change
        until the step retires. The cache waits for the work on torch's current stream, or on the stream of a
        MadeOn. Raises KeyError for an unknown table, TypeError or ValueError for a wrong dtype, device or
        shape. An id out of range marks nothing; gather() returns its error.
        """
        self._check_open()
        with self._clock("enter_s"):
            check_ids(ids, self._states, self._device.torch_device)
            if not self._steps and step > self._entered:
                self._entered = self._planned = self._gathered = self._retired = step
            if step != self._entered:
                raise RuntimeError(f"steps must enter in order: expected {self._entered}, got {step}")
            if self._entered - self._retired >= _core.USE_BITS:
                raise RuntimeError(
                    f"at most {_core.USE_BITS} steps may be live: retire one before entering {step}"
                )
            here = self._on_device(ids)
            with self._batch(hold=True):  # plan() enqueues it
                s = _Step(step, here, self._positions(here))
                self._steps[step] = s
                self._entered = self.next_step = step + 1
                for name, tensor in s.rows.items():
                    self._kernels.enter(self._states[name], self._counters.of(s.index, name), tensor, s.bit)

    def plan(self, step: int) -> None:
        """Choose the pages to read, keep and drop, and post the reads. Steps are planned in order.

        Blocks until the consumer's stream has used the rows of the minibatch before the last.
        """
        with self._clock("wait_s"), stage("wait"):
            self._consumed.wait()
        with self._clock("plan_s"):
            s = self._live(step)
            if step != self._planned:
                raise RuntimeError(f"steps must be planned in order: expected {self._planned}, got {step}")
            with self._batch():
                self._settle()
                self._planned += 1
                self._planned_mask |= s.bit
                s.planned = True
                self._flights.append(s)
                for name, ids in s.rows.items():
                    plan = self._new_plan(s.index, name, ids, planned=True)
                    s.plans.append(plan)
                    s.outputs[name] = plan.out
                    shown = self._counters.shown_at(s.index, name)
                    self._kernels.choose(plan, self._planned_mask, self._planned, shown)
                s.counted = self.stream.record_event()
                for plan in s.plans:
                    most = self._reads.rounds_for(plan.most_misses)
                    for _ in range(min(self._usual_rounds[plan.state.table.name], most)):
                        while self._reads.full and self._flights[0] is not s:
                            self._collect()
                        if self._reads.full:  # of rounds whose size the host does not know: _settle() goes on
                            break
                        self._reads.post(plan)
                # Collect for the next two minibatches only: their rows cross the bus while the consumer
                # computes and while the pages of later ones are read.
                soon = min(self._gathered + 1, step - 1)
                while self._flights[0].number <= soon:
                    self._collect()

    def gather(self, step: int) -> tuple[dict[str, torch.Tensor], Exception | None]:
        """Wait for the step's reads and its rows.

        Returns ({table: rows in the order of its ids}, error). The rows are on the device, ready for torch's
        current stream, and belong to the caller. error: StorageError for a page that could not be read,
        IndexError for an id out of range, OverflowError for a finite value that became infinite in
        output_dtype, or None. Blocks the host, not the device.
        """
        with self._clock("gather_s"):
            s = self._live(step)
            if not s.planned:
                raise RuntimeError(f"step {step} is not planned")
            with self._batch(hold=s.done is not None):
                done = self._finish(s)
        with self._clock("wait_s"), stage("wait"):
            done.synchronize()
        with self._clock("gather_s"):
            self._account(s)
            self._consumed.append(self._device.record_current())
            self._hand_over(s.outputs)
            error = self._bad_id(s.index, s.ids) or self._overflow(s.index, s.ids)
            lost = {n: i for n, i in s.ids.items() if self._counters.seen(s.index, n, "unresolved")}
            if error is None and lost:  # a read failed: the host repeats it and learns the reason
                again, error = self.read_through(lost)
                s.outputs.update(again)
            outputs, s.outputs, s.plans = s.outputs, {}, []  # the consumer's now
            self._gathered = step + 1
            return {name: make_bools_proper(rows) for name, rows in outputs.items()}, error

    def retire(self, step: int) -> None:
        """Remove the step's marks. Steps retire in order. Does not block after gather()."""
        with self._clock("retire_s"):
            s = self._live(step)
            if step != self._retired:
                raise RuntimeError(f"steps must retire in order: expected {self._retired}, got {step}")
            with self._batch(hold=True):  # the next plan() enqueues it
                if s.planned:
                    self._finish(s)
                else:
                    self._planned = step + 1
                self._planned_mask &= ~s.bit
                for name, state in self._states.items():  # of all tables, to zero the counters
                    self._kernels.retire(state, self._counters.of(s.index, name), s.rows.get(name), s.bit)
            del self._steps[step]
            self._retired += 1
            self._gathered = max(self._gathered, self._retired)

    def cancel(self) -> None:
        """Wait for the posted reads, then retire every live step. No mark is left.

        Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        while self._flights:
            s = self._flights[0]
            self._reads.abandon(s.plans)
            self._land(s)
        self.stream.synchronize()
        for s in list(self._steps.values()):
            if s.planned:
                self._account(s)
            self.retire(s.number)
        self.stream.synchronize()
        self.next_step = self._entered

    def read_through(
        self, ids: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Exception | None]:
        """Rows without a step: from lines, else from disk by the host. Does not change the cache.

        ids: as for enter(). Returns like gather(). Blocks. Raises IndexError for an id out of range.
        """
        self._check_open()
        check_ids(ids, self._states, self._device.torch_device)
        self._consumed.wait()
        self._consumed.append(self._device.record_current())
        tensors, outputs, left = self._on_device(ids), {}, {}
        with self._device.use(self.stream):
            for name, tensor in self._positions(tensors).items():
                plan, retired = self._new_plan(THROUGH, name, tensor, planned=False), None
                outputs[name] = plan.out
                left[name] = self._device.empty((len(tensor),), torch.int64)
                while retired != self._retired:  # the garbage collector may cancel steps between its kernels
                    retired = self._retired
                    self._kernels.retire(plan.state, plan.counters, None, 0)
                    self._kernels.gather_lines(plan, left[name])
            self._counters.show(THROUGH)
            self.stream.synchronize()
            if bad := self._bad_id(THROUGH, tensors):
                raise bad
            error = self._overflow(THROUGH, tensors)
            for name, tensor in tensors.items():
                positions = left[name][: self._counters.seen(THROUGH, name, "unresolved")]
                if len(positions):
                    rows, failure = self._host.read_through({name: on_host(tensor[positions])})
                    outputs[name][positions] = rows[name].to(self._device.torch_device)
                    error = error or failure
        self._device.current_stream().wait_event(self.stream.record_event())
        self._hand_over(outputs)
        return {name: make_bools_proper(rows) for name, rows in outputs.items()}, error

    def close(self) -> None:
        """Retire every live step, end the queue, free device memory, unmap host memory. Idempotent.

        Later calls raise RuntimeError. Garbage collection closes the cache too.
        """
        if self._end.alive:
            try:
                self.cancel()
            finally:
                self._end()
                self._free()

    def _free(self) -> None:
        """Return the lines to the device, for its next user, who may not be torch; the rest to torch."""
        if os.getpid() == self._pid:
            self._states.clear()
            self._pools.clear()

    # --- statistics ---

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters by table, with the names of FeatureCache.stats(). Bytes are of device memory.

        A step counts after gather(). Also: host_lines; host_lines_bytes, in pinned host memory;
        scratch_bytes. Seconds are the host's; each table gets an equal part of the total.
        """
        tables, steps = {}, list(self._steps.values())  # the garbage collector may cancel them
        for name, state in self._states.items():
            tables[name] = {
                **self._counters.sums(name),
                **{key: seconds / len(self._states) for key, seconds in self._seconds.items()},
                "lines": state.device_lines,
                "lines_bytes": state.near.nbytes,
                "host_lines": state.host_lines,
                "host_lines_bytes": state.far.bytes.nbytes,
                "line_metadata_bytes": state.owners.nbytes,
                "page_table_bytes": state.words.nbytes,
                "step_bytes": sum(s.ids[name].nbytes for s in steps if name in s.ids)
                * (1 if state.order is None else 2),
                "scratch_bytes": self._pools[name].nbytes + state.metadata_bytes(),
            }
        return tables

    def memory(self) -> dict[str, int]:
        """Bytes by purpose.

        Device memory: "lines", "page tables", "line owners", "window" (ids of live steps), "outputs" (of
        planned steps), "scratch", "queue". Pinned host memory: "host lines", "staging".
        """
        tables = self.stats().values()
        queue = self._queue.memory()
        return {
            **self._fixed_bytes,
            "window": sum(t["step_bytes"] for t in tables),
            "outputs": self._output_bytes(),
            "scratch": self._counters.nbytes + sum(t["scratch_bytes"] for t in tables),
            "queue": queue["queue"],
            "host lines": sum(t["host_lines_bytes"] for t in tables),
            "staging": queue["staging"] + self._counters.shown.bytes.nbytes,
        }

    def audit(self) -> None:
        """Raise RuntimeError if page words and owners disagree. Waits for the stream. For tests."""
        self.stream.synchronize()
        for state in self._states.values():
            state.audit()

    def page_words(self, table: str) -> npt.NDArray[np.uint64]:
        """A copy of a table's page words, uint64[page_count]. Waits for the cache's stream."""
        self.stream.synchronize()
        words: npt.NDArray[np.uint64] = on_host(self._states[table].words).numpy().copy().view(np.uint64)
        return words

    # --- reads ---

    def _new_plan(self, index: int, name: str, ids: torch.Tensor, *, planned: bool) -> Plan:
        """planned: with room for misses; reading through has none."""
        state, counters = self._states[name], self._counters.of(index, name)
        with self._device.use(self.stream):
            out = self._device.empty((len(ids), *state.table.shape), state.out_dtype)
            buffers = self._pools[name].take(len(ids)) if planned else None
        return Plan(index, state, counters, ids, out, buffers)

    def _collect(self) -> None:
        self._reads.collect()
        self._gather_complete()

    def _settle(self) -> None:
        """Post the rounds that planned steps need beyond the usual number, in the order of steps."""
        for s in list(self._flights):
            if s.settled:
                continue
            if s.counted is None:
                raise RuntimeError(f"planning of step {s.number} was interrupted: close the stream")
            s.counted.synchronize()
            for plan in s.plans:
                self._usual_rounds[plan.state.table.name] = self._reads.settle(plan)
            for plan in s.plans:
                while plan.posted < self._usual_rounds[plan.state.table.name]:
                    while self._reads.full:
                        self._collect()
                    self._reads.post(plan)
            s.settled = True
        self._gather_complete()

    def _finish(self, s: _Step) -> Event:
        """Enqueue the remaining work of a planned step."""
        if s.done is None:
            self._settle()
        while s.done is None:
            self._collect()
        return s.done

    def _gather_complete(self) -> None:
        """Enqueue the gather of the steps whose rounds are all collected."""
        while self._flights:
            s = self._flights[0]
            if not s.settled or any(plan.collected < plan.posted for plan in s.plans):
                return
            for plan in s.plans:
                self._kernels.gather_lines(plan)
            self._land(s)

    def _land(self, s: _Step) -> None:
        for plan in s.plans:
            self._pools[plan.state.table.name].put(plan.buffers)
        self._counters.show(s.index)
        s.done = self.stream.record_event()
        self._flights.popleft()

    # --- ids, outputs, clock ---

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError("this cache is closed: make a new one")

    def _live(self, step: int) -> _Step:
        if step not in self._steps:
            raise RuntimeError(f"step {step} is not live (live: {self._retired} <= step < {self._entered})")
        return self._steps[step]

    def _account(self, s: _Step) -> None:
        if not s.accounted:
            s.accounted = True
            self._counters.add(s.index)

    def _overflow(self, index: int, names: Iterable[str]) -> Exception | None:
        states = (self._states[n] for n in names if self._counters.seen(index, n, "overflowed"))
        return next((overflow_error(state.table, state.out_dtype) for state in states), None)

    def _bad_id(self, index: int, ids: Mapping[str, torch.Tensor]) -> IndexError | None:
        return self._counters.bad_id(index, ids, {name: t.row_count for name, t in self.tables.items()})

    def _on_device(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ids on the device, ready for kernels on the cache's stream."""
        here = self._device.torch_device
        made_on = ids.stream if isinstance(ids, MadeOn) else self._device.current_stream()
        moved = dict(ids)
        if not all(t.is_contiguous() for t in ids.values()):
            with self._device.use(made_on):
                moved = {name: t.contiguous() for name, t in ids.items()}
        if made_on != self.stream and any(t.device == here for t in moved.values()):
            if isinstance(ids, MadeOn) and all(moved[name] is t for name, t in ids.items()):
                with self._device.batch(self.stream, hold=True):
                    self.stream.wait_event(ids.made)  # not for what was enqueued after them
            else:
                self.stream.wait_stream(made_on)
        for name, tensor in moved.items():
            if tensor.device == here:
                self._device.hand_over(tensor, made_on, self.stream)
            else:  # torch keeps the pinned copy until the device has read it
                with self._device.use(self.stream):
                    moved[name] = tensor.pin_memory().to(here, non_blocking=True)
        return moved

    def _positions(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The row positions of ids. Ids out of range stay as they are; kernels find them."""
        rows = dict(ids)
        with self._device.use(self.stream):
            for name, tensor in ids.items():
                if self._states[name].order is not None:
                    rows[name] = self._device.empty((len(tensor),), torch.int64)
                    self._kernels.find_rows(self._states[name], tensor, rows[name])
        return rows

    def _hand_over(self, outputs: Mapping[str, torch.Tensor]) -> None:
        current = self._device.current_stream()
        if current == self.stream:
            return
        for out in outputs.values():
            self._device.hand_over(out, self.stream, current)

    def _output_bytes(self) -> int:
        return sum(out.nbytes for s in list(self._steps.values()) for out in s.outputs.values())

    def _batch(self, *, hold: bool = False) -> AbstractContextManager[None]:
        """A batch of kernels on the stream. hold: see Device.batch()."""
        return self._device.batch(self.stream, hold=hold)

    @contextmanager
    def _clock(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[key] += time.perf_counter() - started


def _queue_tables(tables: Sequence[Table], check_crc: bool) -> list[QueueTable]:
    queue_tables: list[QueueTable] = []
    for t in tables:
        first_file = sum(q.file_count for q in queue_tables)
        checksums = np.asarray(t.checksums()) if check_crc else None
        queue_tables.append(QueueTable(t.page_count, first_file, len(t.shard_paths), t.page_bytes, checksums))
    return queue_tables


def _release(pid: int, queue: DeviceQueue, stream: Stream, mapped: list[HostArray]) -> None:
    """End the queue, wait for the stream, unmap. A forked child owns none of these."""
    if os.getpid() != pid:
        return
    try:
        queue.close()
        stream.synchronize()
    finally:
        for array in mapped:
            array.close()
