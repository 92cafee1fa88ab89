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
from gids.io.device.device_queue import BUS_BLOCKS

if TYPE_CHECKING:
    from gids.cuda.device import Device, Stream

_PLAN = "cache/device_cache_plan.cu"
_ROWS = "cache/device_cache_rows.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_GATHER_WAVES = 4  # blocks of gids_gather_lines per multiprocessor; see its launch bounds


@dataclass(frozen=True)
class RoundPages:
    """The misses [first, first + size) of a step and where their pages are: a device::Round."""

    first: int
    size: int
    pair: torch.Tensor | int = 0
    number: int = 0
    buffer: torch.Tensor | int = 0
    errors: torch.Tensor | int = 0
    statuses: torch.Tensor | int = 0

    @property
    def over_bus(self) -> bool:
        """Whether kernels read the pages in host memory."""
        return isinstance(self.buffer, int)


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
        self._by_item(
            _PLAN,
            "gids_find_rows",
            len(ids),
            state.record,
            state.order,
            state.order.itemsize,
            ids,
            len(ids),
            out,
        )

    def retire(self, state: TableState, counters: torch.Tensor, ids: torch.Tensor | None, bit: int) -> None:
        """Remove the marks and zero the counters."""
        n = len(ids) if ids is not None else 0
        self._by_item(
            _PLAN, "gids_retire_window", max(1, n), state.record, counters, 0 if ids is None else ids, n, bit
        )

    def describe(self, misses: MissBuffers) -> None:
        """Write the record of newly allocated buffers."""
        self._launch(
            _PLAN,
            "gids_describe_misses",
            1,
            misses.record,
            misses.keys,
            misses.values,
            len(misses.keys) - 1,
            misses.requests,
            *misses.arrays,
        )

    def choose(
        self,
        state: TableState,
        counters: torch.Tensor,
        misses: MissBuffers,
        ids: torch.Tensor,
        planned_mask: int,
        next_step: int,
    ) -> None:
        """Find hits and misses, choose victims, assign lines.

        planned_mask: the use bits of planned steps, with this one's. next_step: the step after it.
        """
        n, unique = len(ids), min(len(ids), state.table.page_count)
        if n == 0:
            return
        scanned = _core.device_candidates(state.replaced, unique)
        table, choice, pages, at = state.record, state.choice, misses.record, (planned_mask, next_step)
        self._by_item(_PLAN, "gids_clear_set", len(misses.keys), pages)
        self._by_item(_PLAN, "gids_look_up", n, table, counters, pages, choice, ids, n, *at)
        self._by_item(_PLAN, "gids_scan_lines", scanned, table, counters, choice, *at)
        self._by_item(_PLAN, "gids_cut", 1, table, counters, choice, next_step)
        self._by_item(_PLAN, "gids_take_lines", scanned, table, counters, pages, choice, *at)
        self._by_item(_PLAN, "gids_admit_pages", unique, table, counters, pages, choice)

    def fill(
        self, state: TableState, counters: torch.Tensor, misses: MissBuffers, pages: RoundPages, most: int
    ) -> None:
        """Copy a round's pages into their lines. most: upper bound of its pages."""
        over_bus = pages.over_bus or state.host_lines > 0
        blocks = min(-(-most // _WARPS), BUS_BLOCKS if over_bus else 8 * self._device.sm_count)
        self._launch(
            _ROWS, "gids_fill_lines", blocks, state.record, counters, misses.record, *_arguments(pages)
        )

    def gather_round(
        self,
        state: TableState,
        counters: torch.Tensor,
        misses: MissBuffers,
        pages: RoundPages,
        ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Copy rows of a round's pages that have no line into the output."""
        self._launch(
            _ROWS,
            "gids_gather_round",
            self._gather_blocks(len(ids), over_bus=pages.over_bus),
            state.record,
            counters,
            misses.record,
            *_arguments(pages),
            ids,
            len(ids),
            out,
            *state.row_copy,
        )

    def gather_lines(
        self,
        state: TableState,
        counters: torch.Tensor,
        misses: MissBuffers | None,
        ids: torch.Tensor,
        out: torch.Tensor,
        left: torch.Tensor | None = None,
    ) -> None:
        """Copy rows that are in lines into the output. left: int64[n], gets the positions of the others."""
        if state.host_lines:
            self._launch(
                _ROWS,
                "gids_gather_host_lines",
                self._gather_blocks(len(ids), over_bus=True),
                state.record,
                ids,
                len(ids),
                out,
                *state.row_copy,
            )
        self._launch(
            _ROWS,
            "gids_gather_lines",
            self._gather_blocks(len(ids), over_bus=False),
            state.record,
            counters,
            0 if misses is None else misses.record,
            ids,
            len(ids),
            out,
            *state.row_copy,
            0 if left is None else left,
        )

    def show(self, counters: torch.Tensor, address: int) -> None:
        """Copy counters to mapped host memory."""
        self._launch(_PLAN, "gids_show_counters", 1, counters, address, counters.numel())

    def _by_item(self, unit: str, kernel: str, items: int, *args: torch.Tensor | int) -> None:
        """One thread per item, up to what the device holds at once."""
        self._launch(unit, kernel, min(-(-items // _THREADS), 8 * self._device.sm_count), *args)

    def _gather_blocks(self, rows: int, *, over_bus: bool) -> int:
        return min(-(-rows // _WARPS), BUS_BLOCKS if over_bus else _GATHER_WAVES * self._device.sm_count)

    def _launch(self, unit: str, kernel: str, blocks: int, *args: torch.Tensor | int) -> None:
        self._device.launch(self._stream, unit, kernel, blocks, _THREADS, *args)


def _arguments(pages: RoundPages) -> tuple[torch.Tensor | int, ...]:
    return (pages.first, pages.size, pages.pair, pages.number, pages.buffer, pages.errors, pages.statuses)
