"""The reads of planned minibatches, as rounds of the request queue: first posted, first collected.

Called by DeviceFeatureCache. It knows which round holds which missing pages, but not why they are missing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gids.cache.device.counters import Counters
from gids.cache.device.kernels import CacheKernels, RoundPages
from gids.cache.device.state import MissBuffers, TableState
from gids.io.device.device_queue import DeviceQueue, Round

if TYPE_CHECKING:
    from gids.cuda.device import Device, Stream


@dataclass
class Plan:
    """One table of a planned step. index: of its counters."""

    index: int
    state: TableState
    ids: torch.Tensor
    out: torch.Tensor
    misses: MissBuffers
    posted: int = 0  # rounds
    uncollected: int = 0  # of them

    @property
    def most_misses(self) -> int:
        return min(len(self.ids), self.state.table.page_count)


class Reads:
    """Posts rounds and takes their pages. Enqueues everything on the stream and never blocks."""

    def __init__(
        self, device: Device, stream: Stream, queue: DeviceQueue, kernels: CacheKernels, counters: Counters
    ) -> None:
        self._stream = stream
        self._queue = queue
        self._kernels = kernels
        self._counters = counters
        self._rounds: deque[tuple[Plan, int, Round]] = deque()  # (plan, index of the first miss, round)
        rows = queue.round_max if queue.wait_kind == "warp" else 0
        # For wait "warp": the warps read pages into it. The next round on the stream reuses it.
        self._buffer = device.empty((rows * queue.slot_bytes,), torch.uint8)
        self._errors = device.empty((rows,), torch.int32)

    @property
    def nbytes(self) -> int:
        """Device memory without the queue's."""
        return self._buffer.nbytes + self._errors.nbytes

    def free(self) -> None:
        """Release the device memory, after the last round."""
        self._buffer = self._errors = torch.empty(0)

    def rounds_for(self, misses: int) -> int:
        """Number of rounds for this number of missing pages."""
        return -(-misses // self._queue.round_max)

    @property
    def full(self) -> bool:
        """Whether a round must be collected before the next is posted."""
        return len(self._rounds) >= self._queue.rounds_max

    def post(self, plan: Plan) -> None:
        """Post the next round of a plan's misses. There must be room."""
        queue, first = self._queue, plan.posted * self._queue.round_max
        count = self._counters.misses(plan.index, plan.state.table.name)
        if queue.wait_kind == "stream":
            round = queue.post(self._stream, plan.misses.requests, count, first)
            self._rounds.append((plan, first, round))
            plan.posted += 1
            plan.uncollected += 1
            return
        rows, page_bytes = len(self._errors), plan.state.table.page_bytes
        to = self._buffer[: rows * page_bytes].view(rows, page_bytes)
        queue.read_pages(self._stream, plan.misses.requests, count, first, to, self._errors)
        plan.posted += 1
        self._take(plan, RoundPages(first, rows, buffer=to, errors=self._errors), rows_too=True)

    def collect(self) -> None:
        """Copy the oldest round's pages into lines, and rows of pages without a line into the output."""
        plan, first, round = self._rounds[0]
        pages = RoundPages(first, self._queue.round_max, round.pair, round.number)
        with self._queue.reading(self._stream, round):
            self._take(plan, pages, rows_too=True)
        self._rounds.popleft()
        plan.uncollected -= 1

    def abandon(self, plan: Plan) -> None:
        """Give up a plan of the oldest step: free the lines of pages that were not read, copy no rows."""
        while plan.uncollected:
            mine, first, round = self._rounds[0]
            pages = RoundPages(first, self._queue.round_max, round.pair, round.number)
            try:
                with self._queue.reading(self._stream, round):
                    self._take(mine, pages, rows_too=False)
            except RuntimeError:  # the queue is closed or broken: no more pages come
                self._take(mine, RoundPages(first, self._queue.round_max), rows_too=False)
            self._rounds.popleft()
            mine.uncollected -= 1
        first = plan.posted * self._queue.round_max
        if first < plan.most_misses:
            self._take(plan, RoundPages(first, plan.most_misses - first), rows_too=False)

    def _take(self, plan: Plan, pages: RoundPages, *, rows_too: bool) -> None:
        counters = self._counters.of(plan.index, plan.state.table.name)
        most = min(pages.size, max(0, plan.most_misses - pages.first))
        self._kernels.fill(plan.state, counters, plan.misses, pages, most)
        if rows_too:
            self._kernels.gather_round(plan.state, counters, plan.misses, pages, plan.ids, plan.out)
