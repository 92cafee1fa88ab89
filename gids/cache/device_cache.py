"""DeviceFeatureCache: the software cache in device memory, filled by requests that kernels post themselves.

Called by the loader, in the place of FeatureCache: the same steps in the same order. It enqueues; which pages stay
is decided by native/cache/device_cache_plan.cu, and rows are moved by native/cache/device_cache_rows.cu.

Everything runs on one stream of the cache's own, in the order in which it is enqueued: no two kernels meet. The
host waits in two places: in gather(), for the step's own rows; and, before it plans the next step or gathers, for
the number of pages that a planned step misses, which has mostly arrived by then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.budget import format_bytes
from gids.cache.device_preload import Reader, preload
from gids.cache.device_state import (
    COUNTER_WORDS,
    COUNTERS,
    DEVICE_POLICIES,
    HostArray,
    MissBuffers,
    MissPool,
    TableState,
    line_bytes,
)
from gids.cache.feature_cache import FeatureCache
from gids.cache.output_dtype import check_out_dtype, out_dtype_of
from gids.errors import MemoryBudgetError
from gids.io.device_queue import DeviceQueue, QueueTable, Round

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event, Stream
    from gids.io import Engine
    from gids.store import Table

_PLAN = "cache/device_cache_plan.cu"
_ROWS = "cache/device_cache_rows.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_MISSES = COUNTERS.index("misses")
_ALL_BITS = (1 << 64) - 1
HOST_POLICIES = ("lookahead", "static")


@dataclass
class _Plan:
    """One table of a planned step."""

    state: TableState
    ids: torch.Tensor
    out: torch.Tensor
    misses: MissBuffers
    posted: int = 0  # rounds
    uncollected: int = 0


@dataclass
class _Step:
    """A minibatch from entering to retiring."""

    number: int
    asked: list[str]
    ids: dict[str, torch.Tensor]
    planned: bool = False
    plans: list[_Plan] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    counted: Event | None = None  # from then on the host sees how many pages are missing
    settled: bool = False  # all rounds that it needs are posted
    done: Event | None = None  # its rows are in the outputs
    accounted: bool = False


class DeviceFeatureCache:
    """Lines in device memory (and host memory below it) for several tables, filled from disk by one engine.

    device: of :func:`gids.cuda.open_device`. engine: opened on the shards of all tables, in order. lines: cache lines
    of each table in device memory; host_lines: further ones in pinned host memory, whose rows are pulled over the bus.
    heats: uint8 per page for each table that has them. policy: "lookahead", "window-pin", "random" or "static".
    host_policy: "lookahead" replaces lines in host memory as the others; "static" fills them with the hottest pages
    that no line in device memory holds, and leaves them. output_dtype: float32, float16 or bfloat16, for the rows of
    tables of these three; None leaves them as they are. check_crc: compare every page read with its checksum. wait,
    staging_bytes, rounds_max, pairs, timeout_s: see :class:`gids.io.device_queue.DeviceQueue`. reader: for preloading, see
    gids.io.extents; preload_hottest: fill lines with the hottest pages now.

    After construction no device memory is allocated but outputs and ids, which torch caches, and room for the missing
    pages of a minibatch that is larger than any before.

    Raises ValueError for a number, dtype or policy that does not fit, MemoryBudgetError when the device's free memory
    does not hold the cache.
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
        wait: Literal["stream", "warp"] = "stream",
        staging_bytes: int = 256 << 20,
        rounds_max: int = 4,
        pairs: int = 1,
        timeout_s: float = 30.0,
        reader: Reader | None = None,
        preload_hottest: bool = True,
    ) -> None:
        _check_policies(policy, host_policy)
        check_out_dtype(output_dtype)
        self.tables = {t.name: t for t in tables}
        self.stream: Stream = device.new_stream()
        """What the cache runs on. Ids made on it are not waited for on any other."""
        self._device = device
        far = [(host_lines or {}).get(t.name, 0) for t in tables]
        near = [lines[t.name] for t in tables]
        for t, n, m in zip(tables, near, far, strict=True):
            if n < 0 or m < 0 or n + m > _core.MAX_LINES:
                raise ValueError(f"table '{t.name}': {n} + {m} lines; a table has 0 to {_core.MAX_LINES}")
        self._memory = dict(line_bytes(tables, near, far))
        self._check_memory()

        device.preload(_PLAN, _ROWS)
        self._host = FeatureCache(
            engine, tables, lines={t.name: 0 for t in tables}, heats={}, check_crc=check_crc
        )
        checksums = {t.name: np.asarray(t.checksums()) if check_crc else None for t in tables}
        queue_tables: list[QueueTable] = []
        first_files: list[int] = []
        for t in tables:
            first_files.append(sum(q.file_count for q in queue_tables))
            queue_tables.append(
                QueueTable(t.page_count, first_files[-1], len(t.shard_paths), t.page_bytes, checksums[t.name])
            )
        self._queue = DeviceQueue(
            device,
            engine,
            queue_tables,
            staging_bytes=staging_bytes,
            rounds_max=rounds_max,
            pairs=pairs,
            wait=wait,
            timeout_s=timeout_s,
        )
        self._shown = HostArray(device, (_core.USE_BITS + 1) * len(tables) * COUNTER_WORDS * 8)
        self._states: dict[str, TableState] = {}
        mapped = [self._shown]
        self._end = weakref.finalize(self, _release, self._queue, self.stream, mapped)
        with device.use(self.stream):
            # Of each step in its place (step mod 24), and of reading through in the last.
            self._counters = device.zeros((_core.USE_BITS + 1, len(tables), COUNTER_WORDS), torch.int64)
            self._bounce = device.empty((0,), torch.uint8)  # wait "warp": where warps read pages to
            self._errors = device.empty((0,), torch.int32)
            if wait == "warp":
                self._bounce = device.empty((self._queue.round_max * self._queue.slot_bytes,), torch.uint8)
                self._errors = device.empty((self._queue.round_max,), torch.int32)
            for number, t in enumerate(tables):
                kept = far[number] if host_policy == "static" else 0
                state = TableState(
                    device,
                    t,
                    number=number,
                    lines=near[number],
                    host_lines=far[number],
                    replaced=near[number] + far[number] - kept,
                    policy=policy,
                    heat=heats.get(t.name),
                    out_dtype=out_dtype_of(t, output_dtype),
                )
                mapped.append(state.far)
                self._states[t.name] = state
                if preload_hottest:
                    preload(
                        state,
                        engine,
                        first_file=first_files[number],
                        heat=heats.get(t.name),
                        reader=reader,
                        checksums=checksums[t.name],
                    )
            self._pools = {t.name: MissPool(device) for t in tables}

        self.next_step = 0
        """The first step that a new stream may enter; steps never repeat."""
        self._entered = self._planned = self._retired = 0
        self._planned_mask = 0
        self._steps: dict[int, _Step] = {}  # live
        self._flights: deque[_Step] = deque()  # planned, and not all of their rows are on their way
        self._rounds: deque[tuple[_Step, _Plan, int, Round]] = deque()  # posted, not collected
        self._usual_rounds = {t.name: 1 for t in tables}
        self._sums = {t.name: dict.fromkeys(("steps", *COUNTERS), 0) for t in tables}
        self._seconds = dict.fromkeys(("enter_s", "plan_s", "wait_s", "gather_s", "retire_s"), 0.0)
        self._outputs_peak = 0
        self._reading = threading.Lock()  # who reads through

    # --- the life of a step ---

    def enter(self, step: int, ids: Mapping[str, torch.Tensor]) -> None:
        """Mark the pages that minibatch `step` will read. Steps enter in order. Does not block.

        ids: int64[n] for each table, on this device or on the CPU, may repeat; on the device they must stay as they
        are until the step retires, and what torch's current stream holds now comes before. Raises KeyError for an
        unknown table, TypeError or ValueError for a wrong dtype, device or shape. An id out of range marks nothing
        and is gather()'s error.
        """
        with self._clock("enter_s"):
            checked = self._check(ids)
            if not self._steps and step > self._entered:
                self._entered = self._planned = self._retired = step
            if step != self._entered:
                raise RuntimeError(f"steps enter in order: expected {self._entered}")
            if self._entered - self._retired >= _core.USE_BITS:
                raise RuntimeError(f"more than {_core.USE_BITS} minibatches between entering and retiring")
            s = _Step(step, list(checked), self._on_device(checked))
            self._steps[step] = s
            self._entered = self.next_step = step + 1
            for name, tensor in s.ids.items():
                self._launch_by_row("gids_enter_window", name, s, tensor)

    def plan(self, step: int) -> None:
        """Decide which pages are read, kept and dropped, and post the reads. Steps are planned in order."""
        with self._clock("plan_s"):
            s = self._live(step)
            if step != self._planned:
                raise RuntimeError(f"steps are planned in order: expected {self._planned}")
            self._settle()
            self._planned += 1
            self._planned_mask |= _use_bit(step)
            s.planned = True
            self._flights.append(s)
            with self._device.use(self.stream):
                for name, ids in s.ids.items():
                    s.plans.append(self._new_plan(s, name, ids))
                for plan in s.plans:
                    self._choose(s, plan)
            self._show(step % _core.USE_BITS)
            s.counted = self.stream.record_event()
            self._outputs_peak = max(self._outputs_peak, self._output_bytes())
            for plan in s.plans:
                for _ in range(min(self._usual_rounds[plan.state.table.name], self._most_rounds(plan))):
                    self._post(s, plan)

    def gather(self, step: int) -> tuple[dict[str, torch.Tensor], Exception | None]:
        """Wait for the step's reads and its rows.

        Returns the rows of each table that the minibatch asked for, in the order of its ids, on the device and ready
        for torch's current stream; and the error, StorageError for a page that could not be read, IndexError for an
        id out of range. The tensors are the caller's. Blocks the host until the rows are there, not the device.
        """
        with self._clock("gather_s"):
            s = self._live(step)
            if not s.planned:
                raise RuntimeError(f"step {step} is not planned")
            self._settle()
            while s.done is None:
                self._collect()
        with self._clock("wait_s"):
            s.done.synchronize()
        with self._clock("gather_s"):
            self._account(s)
            error: Exception | None = self._bad_id(s.number % _core.USE_BITS, s.ids)
            shown = self._shown_counters(s.number % _core.USE_BITS)
            lost = [n for n in s.ids if shown[self._states[n].number][COUNTERS.index("unresolved")]]
            if error is None and lost:  # a page's read failed: once more, by the host, who knows the reason
                again, error = self.read_through({name: s.ids[name] for name in lost})
                s.outputs.update(again)
            else:
                self._hand_over(s.done, s.outputs)
            return {name: s.outputs[name] for name in s.asked}, error

    def retire(self, step: int) -> None:
        """Take the step's marks back. Steps retire in order. Does not block."""
        with self._clock("retire_s"):
            s = self._live(step)
            if step != self._retired:
                raise RuntimeError(f"steps retire in order: expected {self._retired}")
            if s.planned and s.done is None:
                self._settle()
                while s.done is None:
                    self._collect()
            if not s.planned:
                self._planned = step + 1
            self._planned_mask &= ~_use_bit(step)
            for name in self._states:  # all of them: counters go too
                self._launch_by_row("gids_retire_window", name, s, s.ids.get(name))
            del self._steps[step]
            self._retired += 1

    def cancel(self) -> None:
        """Retire every live step, planned or not, after the reads that were posted. Nothing stays marked."""
        while self._flights:
            self._abandon(self._flights[0])
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
        """Rows without a step: from lines where they are, else from disk by the host. Leaves the cache as it is.

        Blocks. Raises IndexError for an id out of range.
        """
        with self._reading, self._device.use(self.stream):
            tensors = self._on_device(self._check(ids))
            outputs = {name: self._new_output(self._states[name], len(t)) for name, t in tensors.items()}
            left = {name: self._device.empty((len(t),), torch.int64) for name, t in tensors.items()}
            slot = _core.USE_BITS
            self._counters[slot].zero_()
            for name, tensor in tensors.items():
                self._gather_lines(self._states[name], slot, tensor, outputs[name], None, left[name])
            self._show(slot)
            self.stream.synchronize()
            bad = self._bad_id(slot, tensors)
            if bad is not None:
                raise bad
            shown = self._shown_counters(slot)
            error: Exception | None = None
            for name, tensor in tensors.items():
                count = int(shown[self._states[name].number][COUNTERS.index("unresolved")])
                if count:
                    positions = left[name][:count]
                    rows, failure = self._host.read_through({name: tensor[positions].cpu()})
                    moved = rows[name].to(outputs[name].dtype).to(self._device.torch_device)
                    outputs[name][positions] = moved
                    error = error or failure
            done = self.stream.record_event()
        self._hand_over(done, outputs)
        return outputs, error

    def close(self) -> None:
        """Retire every live step, end the queue, unmap host memory. May be called twice.

        Happens also when the cache is garbage. The lines go when the last reference does.
        """
        if self._end.alive:
            try:
                self.cancel()
            finally:
                self._end()

    # --- what it is like ---

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of each table, as the cache in host memory has them; bytes are of device memory.

        A step counts once it was gathered. Besides: host_lines, host_lines_bytes (pinned host memory), scratch_bytes.
        The seconds are the host's, over all tables, shared out equally.
        """
        tables = {}
        for name, state in self._states.items():
            d: dict[str, Any] = dict(self._sums[name])
            d["hits"] = d["pages"] - d["misses"]
            del d["bad"], d["unresolved"]
            d |= {key: s / len(self._states) for key, s in self._seconds.items()}
            d["lines"] = state.device_lines
            d["lines_bytes"] = state.near.nbytes
            d["host_lines"] = state.host_lines
            d["host_lines_bytes"] = state.far.bytes.nbytes
            d["line_metadata_bytes"] = state.owners.nbytes
            d["page_table_bytes"] = state.words.nbytes
            d["step_bytes"] = sum(s.ids[name].nbytes for s in self._steps.values() if name in s.ids)
            d["scratch_bytes"] = self._pools[name].nbytes + state.metadata_bytes()
            tables[name] = d
        return tables

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. Of device memory: "lines", "page tables", "line owners", "window" (ids of live steps),
        "outputs" (planned and not handed out), "scratch", "queue". Of pinned host memory: "host lines", "staging".
        """
        tables = self.stats().values()
        queue = self._queue.memory()
        scratch = self._counters.nbytes + self._bounce.nbytes + self._errors.nbytes
        return {
            **self._memory,
            "window": sum(t["step_bytes"] for t in tables),
            "outputs": self._output_bytes(),
            "scratch": scratch + sum(t["scratch_bytes"] for t in tables),
            "queue": queue["queue"],
            "host lines": sum(t["host_lines_bytes"] for t in tables),
            "staging": queue["staging"] + self._shown.bytes.nbytes,
        }

    def output_bytes(self) -> tuple[int, int]:
        """(bytes of outputs planned and not handed out, the most there ever were). What was handed out is torch's."""
        return self._output_bytes(), self._outputs_peak

    def audit(self) -> None:
        """Compare page words and line owners; RuntimeError on a disagreement. Waits for the cache's stream. For tests."""
        self.stream.synchronize()
        for state in self._states.values():
            state.audit()

    def page_words(self, table: str) -> npt.NDArray[np.uint64]:
        """uint64[page_count]: a copy of a table's page words. Waits for the cache's stream. For tests."""
        self.stream.synchronize()
        words: npt.NDArray[np.uint64] = self._states[table].words.cpu().numpy().copy().view(np.uint64)
        return words

    # --- planning ---

    def _new_plan(self, s: _Step, name: str, ids: torch.Tensor) -> _Plan:
        state = self._states[name]
        out = self._new_output(state, len(ids))
        s.outputs[name] = out
        return _Plan(state, ids, out, self._pools[name].take(min(len(ids), state.table.page_count)))

    def _new_output(self, state: TableState, n: int) -> torch.Tensor:
        return self._device.empty((n, *state.table.shape), state.out_dtype)

    def _choose(self, s: _Step, plan: _Plan) -> None:
        """Hits and misses, victims, lines."""
        state, n = plan.state, len(plan.ids)
        plan.misses.keys.zero_()
        counters, misses = self._counters[s.number % _core.USE_BITS, state.number], plan.misses.record
        at = (self._planned_mask, self._planned)
        unique = min(n, state.table.page_count)
        scanned = min(state.replaced, 4 * unique + 1024) if n else 0

        def launch(kernel: str, items: int, *args: torch.Tensor | int) -> None:
            self._device.launch(
                self.stream, _PLAN, kernel, self._blocks(items), _THREADS, state.record, counters, *args
            )

        launch("gids_look_up", n, misses, state.choice, plan.ids, n, *at)
        launch("gids_scan_lines", scanned, state.choice, *at)
        launch("gids_cut", min(n, 1), state.choice, self._planned)
        launch("gids_take_lines", scanned, misses, state.choice, *at)
        launch("gids_admit_pages", unique, misses, state.choice)

    def _most_rounds(self, plan: _Plan) -> int:
        return -(-min(len(plan.ids), plan.state.table.page_count) // self._queue.round_max)

    def _settle(self) -> None:
        """Post what the planned steps need beyond the usual number of rounds, in their order."""
        for s in list(self._flights):
            if s.settled:
                continue
            if s.counted is None:
                raise RuntimeError(f"planning step {s.number} was interrupted: close the stream")
            s.counted.synchronize()
            shown = self._shown_counters(s.number % _core.USE_BITS)
            for plan in s.plans:
                needed = -(-int(shown[plan.state.number][_MISSES]) // self._queue.round_max)
                self._usual_rounds[plan.state.table.name] = max(1, needed)
                while plan.posted < needed:
                    self._post(s, plan)
            s.settled = True
        self._finish()

    # --- reading ---

    def _post(self, s: _Step, plan: _Plan) -> None:
        """One more round of a table's misses; where there is no room, after the oldest is collected."""
        first = plan.posted * self._queue.round_max
        slot, number = s.number % _core.USE_BITS, plan.state.number
        count = self._counters[slot, number, _MISSES : _MISSES + 1]
        if self._queue.wait_kind == "warp":
            page_bytes, rows = plan.state.table.page_bytes, len(self._errors)
            to = self._bounce[: rows * page_bytes].view(rows, page_bytes)
            self._queue.read_pages(self.stream, plan.misses.requests, count, first, to, self._errors)
            plan.posted += 1
            self._take_round(s, plan, first, 0, 0, to, self._errors)
            return
        while len(self._rounds) >= self._queue.rounds_max:
            self._collect()
        round = self._queue.post(self.stream, plan.misses.requests, count, first)
        plan.posted += 1
        plan.uncollected += 1
        self._rounds.append((s, plan, first, round))

    def _collect(self) -> None:
        """Of the oldest round: pages into lines, and rows of pages that won none into the output."""
        s, plan, first, round = self._rounds[0]
        self._queue.wait(self.stream, round)
        self._take_round(s, plan, first, round.pair, round.number, 0, 0)
        self._queue.collected(round)
        self._rounds.popleft()
        plan.uncollected -= 1
        self._finish()

    def _take_round(
        self,
        s: _Step,
        plan: _Plan,
        first: int,
        pair: torch.Tensor | int,
        number: int,
        buffer: torch.Tensor | int,
        errors: torch.Tensor | int,
        *,
        pages: int | None = None,
        rows: bool = True,
    ) -> None:
        state, size = plan.state, pages or self._queue.round_max
        counters = self._counters[s.number % _core.USE_BITS, state.number]
        where = (first, size, pair, number, buffer, errors)
        most = min(size, max(0, min(len(plan.ids), state.table.page_count) - first))
        self._device.launch(
            self.stream,
            _ROWS,
            "gids_fill_lines",
            self._blocks(most, _WARPS),
            _THREADS,
            state.record,
            counters,
            plan.misses.record,
            *where,
        )
        if rows:
            self._device.launch(
                self.stream,
                _ROWS,
                "gids_gather_round",
                self._blocks(len(plan.ids), _WARPS, waves=4),
                _THREADS,
                state.record,
                counters,
                plan.misses.record,
                *where,
                plan.ids,
                len(plan.ids),
                plan.out,
                state.copy_as,
                state.row_items,
                state.out_row_bytes,
            )

    def _finish(self) -> None:
        """Gather the rows of the steps whose rounds are all collected."""
        while self._flights:
            s = self._flights[0]
            if not s.settled or any(plan.uncollected for plan in s.plans):
                return
            slot = s.number % _core.USE_BITS
            for plan in s.plans:
                self._gather_lines(plan.state, slot, plan.ids, plan.out, plan.misses, None)
                self._pools[plan.state.table.name].put(plan.misses)
            self._show(slot)
            s.done = self.stream.record_event()
            self._flights.popleft()

    def _gather_lines(
        self,
        state: TableState,
        slot: int,
        ids: torch.Tensor,
        out: torch.Tensor,
        misses: MissBuffers | None,
        left: torch.Tensor | None,
    ) -> None:
        self._device.launch(
            self.stream,
            _ROWS,
            "gids_gather_lines",
            self._blocks(len(ids), _WARPS, waves=4),
            _THREADS,
            state.record,
            self._counters[slot, state.number],
            misses.record if misses is not None else 0,
            ids,
            len(ids),
            out,
            state.copy_as,
            state.row_items,
            state.out_row_bytes,
            left if left is not None else 0,
        )

    def _abandon(self, s: _Step) -> None:
        """Give up the oldest planned step: collect what was posted, free the lines of what was not. No rows."""
        while any(plan.uncollected for plan in s.plans):
            _, plan, first, round = self._rounds[0]
            try:
                self._queue.wait(self.stream, round)
                self._take_round(s, plan, first, round.pair, round.number, 0, 0, rows=False)
                self._queue.collected(round)
            except RuntimeError:  # the queue is closed or broken: nothing comes any more
                self._take_round(s, plan, first, 0, 0, 0, 0, rows=False)
            self._rounds.popleft()
            plan.uncollected -= 1
        for plan in s.plans:
            first, unique = (
                plan.posted * self._queue.round_max,
                min(len(plan.ids), plan.state.table.page_count),
            )
            if not s.settled and first < unique:
                self._take_round(s, plan, first, 0, 0, 0, 0, pages=unique - first, rows=False)
            self._pools[plan.state.table.name].put(plan.misses)
        self._show(s.number % _core.USE_BITS)
        s.done = self.stream.record_event()
        self._flights.popleft()

    # --- errors and counters ---

    def _bad_id(self, slot: int, ids: Mapping[str, torch.Tensor]) -> IndexError | None:
        shown = self._shown_counters(slot)
        for name, tensor in ids.items():
            bad = int(shown[self._states[name].number][COUNTERS.index("bad")])
            if bad:
                position = ~bad & _ALL_BITS
                return IndexError(
                    f"table '{name}': id {int(tensor[position])} at position {position} is out of range for a table "
                    f"of {self.tables[name].row_count} rows"
                )
        return None

    def _show(self, slot: int) -> None:
        words = len(self._states) * COUNTER_WORDS
        to = self._shown.address + slot * words * 8
        self._device.launch(
            self.stream, _PLAN, "gids_show_counters", 1, _THREADS, self._counters[slot], to, words
        )

    def _shown_counters(self, slot: int) -> npt.NDArray[np.uint64]:
        """uint64[tables, COUNTER_WORDS], as they were at the last event behind _show()."""
        words = self._shown.bytes.view(np.uint64).reshape(-1, len(self._states), COUNTER_WORDS)
        counters: npt.NDArray[np.uint64] = words[slot]
        return counters

    def _account(self, s: _Step) -> None:
        if s.accounted:
            return
        s.accounted = True
        shown = self._shown_counters(s.number % _core.USE_BITS)
        for name, state in self._states.items():
            self._sums[name]["steps"] += 1
            for key, value in zip(COUNTERS, shown[state.number], strict=False):
                self._sums[name][key] += int(value)

    # --- small things ---

    def _live(self, step: int) -> _Step:
        if step not in self._steps:
            raise RuntimeError(
                f"step {step} is not live (live: {self._retired} to {self._entered}, exclusive)"
            )
        return self._steps[step]

    def _check(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in ids.items():
            if name not in self._states:
                raise KeyError(
                    f"no table '{name}' in this loader (it loads {', '.join(map(repr, self._states))})"
                )
            _check_ids(tensor, name, self._device.torch_device)
        return dict(ids)

    def _on_device(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ids where kernels of the cache's stream may read them from now on."""
        here = self._device.torch_device
        current = self._device.current_stream()
        moved = {}
        if current != self.stream and any(t.device == here for t in ids.values()):
            contiguous = {name: t.contiguous() for name, t in ids.items()}
            self.stream.wait_stream(current)
            ids = contiguous
        for name, tensor in ids.items():
            if tensor.device == here:
                moved[name] = tensor.contiguous()
                self._device.hand_over(moved[name], current, self.stream)
            else:  # torch keeps the pinned copy until the device has read it
                with self._device.use(self.stream):
                    moved[name] = tensor.contiguous().pin_memory().to(here, non_blocking=True)
        return moved

    def _hand_over(self, done: Event, outputs: Mapping[str, torch.Tensor]) -> None:
        current = self._device.current_stream()
        if current == self.stream:
            return
        current.wait_event(done)
        for out in outputs.values():
            self._device.hand_over(out, self.stream, current)

    def _launch_by_row(self, kernel: str, name: str, s: _Step, ids: torch.Tensor | None) -> None:
        state, n = self._states[name], len(ids) if ids is not None else 0
        self._device.launch(
            self.stream,
            _PLAN,
            kernel,
            max(1, self._blocks(n)),
            _THREADS,
            state.record,
            self._counters[s.number % _core.USE_BITS, state.number],
            ids if ids is not None else 0,
            n,
            _use_bit(s.number),
        )

    def _blocks(self, items: int, per_block: int = _THREADS, *, waves: int = 8) -> int:
        """Enough for the items, and no more than the device holds at once."""
        return min(-(-items // per_block), waves * self._device.sm_count)

    def _output_bytes(self) -> int:
        return sum(out.nbytes for s in self._steps.values() for out in s.outputs.values())

    def _check_memory(self) -> None:
        free, total = self._device.memory_info()
        needed = sum(self._memory.values())
        if needed > free:
            listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in self._memory.items())
            raise MemoryBudgetError(
                f"the cache takes {listing} = {needed} bytes ({format_bytes(needed)}) of memory on {self._device.name}, "
                f"of which {format_bytes(free)} of {format_bytes(total)} are free: give it fewer bytes, or let go of what "
                f"else lies there"
            )

    @contextmanager
    def _clock(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[key] += time.perf_counter() - started


def _use_bit(step: int) -> int:
    return 1 << step % _core.USE_BITS


def _check_policies(policy: str, host_policy: str) -> None:
    if policy == "lru":
        raise ValueError(
            f"policy 'lru' exists with device='cpu' only; on a device there are {', '.join(DEVICE_POLICIES)}"
        )
    if policy not in DEVICE_POLICIES:
        raise ValueError(f"no policy '{policy}' (there are {', '.join(DEVICE_POLICIES)})")
    if host_policy not in HOST_POLICIES:
        raise ValueError(
            f"no policy '{host_policy}' for lines in host memory (there are {', '.join(HOST_POLICIES)})"
        )


def _check_ids(ids: torch.Tensor, table: str, device: torch.device) -> None:
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"ids for table '{table}' are {type(ids).__name__}; expected a torch.Tensor of int64")
    if ids.dtype != torch.int64:
        raise TypeError(
            f"ids for table '{table}' are {ids.dtype}; expected torch.int64: convert them with .long()"
        )
    if ids.device != device and ids.device.type != "cpu":
        raise ValueError(
            f"ids for table '{table}' are on {ids.device}; expected {device} or cpu: move them with .to()"
        )
    if ids.dim() != 1:
        raise ValueError(f"ids for table '{table}' have shape {tuple(ids.shape)}; expected one dimension")


def _release(queue: DeviceQueue, stream: Stream, mapped: list[HostArray]) -> None:
    """End the queue, wait for the stream, unmap."""
    try:
        queue.close()
        stream.synchronize()
    finally:
        for array in mapped:
            array.close()
