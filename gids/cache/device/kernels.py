"""The kernels of the cache in device memory. Each method enqueues one with its arguments and grid.

Called by DeviceFeatureCache and its parts, always for one stream. The kernels are described in
native/cache/device_cache_plan.cu and device_cache_rows.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gids import _core
from gids.cache.device.state import MissBuffers, TableState

if TYPE_CHECKING:
    from gids.cuda.device import Device, Stream
    from gids.io.device.device_queue import Round

_PLAN = "cache/device_cache_plan.cu"
_ROWS = "cache/device_cache_rows.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_BUS_BLOCKS = 32
"""The most blocks of a kernel that is bounded by the bus. Bandwidth times delay is about 80 KB, which a few
blocks have in flight; more would only keep registers from the kernels of training."""
_GATHER_WAVES = 4  # blocks of gids_gather_lines per multiprocessor; see its launch bounds


@dataclass
class Plan:
    """One table of a planned step, or of reading through: its rows go to out.

    index: of its counters, which are int64[WORDS] on the device. misses: None for reading through. posted:
    rounds, of which the first ones are collected. missing: pages; None until the host has waited for its
    counters.
    """

    index: int
    state: TableState
    counters: torch.Tensor
    ids: torch.Tensor
    out: torch.Tensor
    misses: MissBuffers | None
    posted: int = 0
    collected: int = 0
    missing: int | None = None

    @property
    def buffers(self) -> MissBuffers:
        """misses of a step."""
        assert self.misses is not None
        return self.misses

    @property
    def most_misses(self) -> int:
        return min(len(self.ids), self.state.table.page_count)


class CacheKernels:
    """Launches on one stream. counters: int64[WORDS] on the device, of a table and step."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        device.preload(_PLAN, _ROWS)

    def enter(self, state: TableState, counters: torch.Tensor, ids: torch.Tensor, bit: int) -> None:
        """Mark the pages of ids."""
        self._by_item(_PLAN, "gids_enter_window", len(ids), state.record, counters, ids, len(ids), bit)

    def find_rows(self, state: TableState, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the row positions of ids, int64[n], in a table that has an order."""
        assert state.order is not None
        order = (state.order, state.order.itemsize)
        self._by_item(_PLAN, "gids_find_rows", len(ids), state.record, *order, ids, len(ids), out)

    def retire(self, state: TableState, counters: torch.Tensor, ids: torch.Tensor | None, bit: int) -> None:
        """Remove the marks and zero the counters."""
        n, id_array = (0, 0) if ids is None else (len(ids), ids)
        self._by_item(_PLAN, "gids_retire_window", max(1, n), state.record, counters, id_array, n, bit)

    def describe(self, misses: MissBuffers) -> None:
        """Write the record of newly allocated buffers."""
        table = (misses.keys, misses.values, len(misses.keys) - 1, misses.requests)
        arrays = (*misses.arrays, misses.first_rows, misses.next_rows)
        self._launch(_PLAN, "gids_describe_misses", 1, misses.record, *table, *arrays)

    def choose(self, plan: Plan, planned_mask: int, next_step: int, shown: int) -> None:
        """Find hits and misses, choose victims, assign lines. Copy the counters to mapped host memory.

        planned_mask: the use bits of planned steps, with this one's. next_step: the step after it.
        shown: the address of the copy.
        """
        state, ids, n, unique = plan.state, plan.ids, len(plan.ids), plan.most_misses
        if n == 0:
            self.show(plan.counters, shown)
            return
        scanned = _core.device_candidates(state.replaced, unique)
        table, choice, at = (state.record, plan.counters), state.choice, (planned_mask, next_step)
        pages = plan.buffers.record
        self._by_item(_PLAN, "gids_clear_set", len(plan.buffers.keys), pages)
        self._by_item(_PLAN, "gids_look_up", n, *table, pages, choice, ids, n, *at)
        self._by_item(_PLAN, "gids_scan_lines", max(1, scanned), *table, choice, *at)
        self._by_item(_PLAN, "gids_take_lines", scanned, *table, pages, choice, *at)
        self._by_item(_PLAN, "gids_admit_pages", unique, *table, pages, choice, shown)

    def take(self, plan: Plan, first: int, size: int, pages: Round | None) -> None:
        """Copy a round's pages into their lines, and rows of those that have none to the output.

        first, size: the round has the misses [first, first + size). pages: None frees the lines.
        """
        blocks = _BUS_BLOCKS if plan.state.host_lines else 8 * self._device.sm_count
        records = (plan.state.record, plan.counters, plan.buffers.record)
        at = (first, size, *((0, 0, 0) if pages is None else pages))
        rows = (plan.ids, plan.out, *plan.state.row_copy)
        self._launch(_ROWS, "gids_take_round", min(-(-size // _WARPS), blocks), *records, *at, *rows)

    def gather_lines(self, plan: Plan, left: torch.Tensor | int = 0) -> None:
        """Copy rows that are in lines into the output. left: int64[n], gets the positions of the others."""
        state, misses = plan.state, 0 if plan.misses is None else plan.misses.record
        if state.host_lines:
            self._gather("gids_gather_host_lines", plan, True, state.record, plan.counters)
        self._gather("gids_gather_lines", plan, False, state.record, plan.counters, misses, left=(left,))

    def show(self, counters: torch.Tensor, address: int) -> None:
        """Copy counters to mapped host memory."""
        self._launch(_PLAN, "gids_show_counters", 1, counters, address, counters.numel())

    def _by_item(self, unit: str, kernel: str, items: int, *args: torch.Tensor | int) -> None:
        """One thread per item, up to what the device holds at once."""
        self._launch(unit, kernel, min(-(-items // _THREADS), 8 * self._device.sm_count), *args)

    def _gather(
        self,
        kernel: str,
        plan: Plan,
        over_bus: bool,
        *records: torch.Tensor | int,
        left: tuple[torch.Tensor | int, ...] = (),
    ) -> None:
        n, most = len(plan.ids), _BUS_BLOCKS if over_bus else _GATHER_WAVES * self._device.sm_count
        rows = (plan.ids, n, plan.out, *plan.state.row_copy, *left)
        self._launch(_ROWS, kernel, min(-(-n // _WARPS), most), *records, *rows)

    def _launch(self, unit: str, kernel: str, blocks: int, *args: torch.Tensor | int) -> None:
        self._device.launch(self._stream, unit, kernel, blocks, _THREADS, *args)
