"""The reads of a cache on a device. Called by DeviceFeatureCache.

Reads: those of planned minibatches, as rounds of the request queue: first posted, first collected. It knows
which round holds which missing pages, but not why they are missing. preload: fills lines with the hottest
pages before the first minibatch. A page that cannot be read stays out of the cache. The minibatch that needs
it gets the error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.kernels import CacheKernels, Plan, RoundPages, Seen
from gids.cache.device.state import RESIDENT, Counters, TableState
from gids.cuda.device import CACHE_PRIORITY
from gids.errors import StorageError
from gids.io.device.device_queue import DeviceQueue, Round

if TYPE_CHECKING:
    from gids.cuda.device import Device, Event, Stream
    from gids.io import Engine
    from gids.io.device.device_queue import QueueTable
    from gids.io.device.extents import ExtentReader

_log = logging.getLogger("gids")
_CHUNK_BYTES = 64 << 20
_BLOCK = 1 << 24  # bincount makes 8 bytes of each page's heat

Pages = npt.NDArray[np.int64]

COPY_BUFFERS = 2
"""With transfer="copy": one is filled by the copy engine while kernels take the other one's pages."""


class CopyBuffer:
    """A round's pages and statuses in device memory. used: after it, the last kernel has read them."""

    def __init__(self, device: Device, rows: int, slot_bytes: int) -> None:
        self.pages = device.empty((rows * slot_bytes,), torch.uint8)
        self.statuses = device.empty((rows,), torch.int64)
        self.used: Event | None = None


class Reads:
    """Posts rounds and takes their pages. Enqueues kernels on the stream and never blocks.

    With transfer="copy", copies have a stream of their own: one round is copied while kernels take another.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        queue: DeviceQueue,
        kernels: CacheKernels,
        counters: Counters,
        transfer: str,
    ) -> None:
        self._stream = stream
        self._queue = queue
        self._kernels = kernels
        self._counters = counters
        self._rounds: deque[tuple[Plan, int, Round]] = deque()  # (plan, index of the first miss, round)
        warps, copied = queue.wait_kind == "warp", queue.wait_kind == "stream" and transfer == "copy"
        rows = queue.round_max
        # Warps put a round's pages into it. The next round on the stream reuses it.
        self._buffer = device.empty((rows * queue.slot_bytes if warps else 0,), torch.uint8)
        self._errors = device.empty((rows if warps else 0,), torch.int32)
        count = COPY_BUFFERS if copied else 0
        self._buffers = [CopyBuffer(device, rows, queue.slot_bytes) for _ in range(count)]
        self._next_buffer = cycle(self._buffers)
        # Of the priority of the stream, which waits for words too: other streams share no channel with it.
        self._copies = device.new_stream(CACHE_PRIORITY) if copied else stream
        self._copies.wait_stream(stream)  # which made the buffers
        for buffer in self._buffers:
            device.hand_over(buffer.pages, stream, self._copies)
            device.hand_over(buffer.statuses, stream, self._copies)
        # By pair: tickets of the rounds whose size is known, and the later rounds.
        self._tickets = [0] * queue.pairs
        self._unsized: list[deque[tuple[Seen, int, int]]] = [deque() for _ in range(queue.pairs)]
        self._first_tickets: dict[int, int] = {}  # of rounds that are not collected, by their index

    @property
    def nbytes(self) -> int:
        """Device memory without the queue's."""
        copied = sum(buffer.pages.nbytes + buffer.statuses.nbytes for buffer in self._buffers)
        return self._buffer.nbytes + self._errors.nbytes + copied

    def free(self) -> None:
        """Release the device memory, after the last round."""
        self._buffer = self._errors = torch.empty(0)
        self._buffers, self._next_buffer = [], cycle([])

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
            round = queue.post(self._stream, plan.buffers.requests, count, first)
            self._rounds.append((plan, first, round))
            self._unsized[round.index % queue.pairs].append((plan.seen, first, round.index))
            plan.posted += 1
            plan.uncollected += 1
            return
        rows, page_bytes = len(self._errors), plan.state.table.page_bytes
        to = self._buffer[: rows * page_bytes].view(rows, page_bytes)
        queue.read_pages(self._stream, plan.buffers.requests, count, first, to, self._errors)
        plan.posted += 1
        self._take(plan, RoundPages(first, rows, buffer=to, errors=self._errors), rows_too=True)

    def settle(self, plan: Plan) -> int:
        """Note what a plan misses, and return the rounds that it needs. The host has seen its counters."""
        table = plan.state.table.name
        plan.seen.misses = self._counters.seen(plan.index, table, "misses")
        plan.seen.bypasses = self._counters.seen(plan.index, table, "bypasses")
        return self.rounds_for(plan.seen.misses)

    def collect(self) -> None:
        """Copy the oldest round's pages into lines, and rows of pages without a line into the output."""
        plan, first, round = self._rounds[0]
        pages = RoundPages(first, self._queue.round_max, round.pair, round.number)
        ticket = self._first_ticket(round)
        if self._buffers and ticket is not None and plan.state.table.page_bytes == self._queue.slot_bytes:
            self._copy(plan, round, pages, ticket)
        else:
            with self._queue.reading(self._stream, round):
                self._take(plan, pages, rows_too=True)
        self._rounds.popleft()
        plan.uncollected -= 1

    def _copy(self, plan: Plan, round: Round, pages: RoundPages, ticket: int) -> None:
        """Take the round's pages from a buffer. ticket: of its first page; it tells where the pages are."""
        assert plan.seen.misses is not None
        size, buffer = self._size(plan.seen.misses, pages.first), next(self._next_buffer)
        if buffer.used is not None:
            self._copies.wait_event(buffer.used)
        with self._queue.reading(self._copies, round):
            rows = buffer.pages.view(-1, self._queue.slot_bytes)[:size]
            self._queue.copy(self._copies, round, ticket, rows, buffer.statuses[:size])
        self._stream.wait_event(self._copies.record_event())
        self._take(plan, replace(pages, buffer=buffer.pages, statuses=buffer.statuses), rows_too=True)
        buffer.used = self._stream.record_event()

    def _first_ticket(self, round: Round) -> int | None:
        """The ticket of a round's first request, if the host knows it. Forgets it."""
        pair = round.index % self._queue.pairs
        unsized = self._unsized[pair]
        while unsized and (misses := unsized[0][0].misses) is not None:
            _, first, index = unsized.popleft()
            if index >= round.index:
                self._first_tickets[index] = self._tickets[pair]
            self._tickets[pair] += self._size(misses, first)
        return self._first_tickets.pop(round.index, None)

    def _size(self, misses: int, first: int) -> int:
        """Requests of a round."""
        return min(self._queue.round_max, max(0, misses - first))

    def abandon(self, plan: Plan) -> None:
        """Give up a plan of the oldest step: free the lines of pages that were not read, copy no rows."""
        while plan.uncollected:
            mine, first, round = self._rounds[0]
            self._first_ticket(round)
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
        most = plan.most_misses if plan.seen.misses is None else plan.seen.misses
        most = min(pages.size, max(0, most - pages.first))
        if most:
            self._kernels.fill(plan, pages, most)
            if rows_too and plan.seen.bypasses != 0:
                self._kernels.gather_round(plan, pages)


def preload(
    state: TableState,
    engine: Engine,
    in_files: QueueTable,
    *,
    heat: npt.NDArray[np.uint8] | None,
    reader: ExtentReader | None,
) -> None:
    """Fill lines in device memory with the hottest pages, and lines in host memory with the next.

    Pages without heat go only into lines that are never replaced; those are always filled.
    in_files: the table's pages in the engine's files, and checksums to compare. reader: reads straight
    into device memory; without one, or with checksums, the engine reads into host memory. torch's current
    stream must be the cache's. Blocks.
    """
    page_count = state.table.page_count
    near = _hottest(heat, page_count, state.device_lines)
    far = np.setdiff1d(_hottest(heat, page_count, state.line_count), near, assume_unique=True)
    near = _warm(near, heat)
    if state.replaced > state.device_lines:
        far = _warm(far, heat)
    near, far = (_in_files(pages, len(state.table.shard_paths)) for pages in (near, far))
    loader = _Loader(state, engine, in_files)
    if reader is not None and in_files.checksums is None:
        loader.near_by_extents(near, reader)
    else:
        loader.near_by_engine(near)
    loader.far(far)


class _Loader:
    def __init__(self, state: TableState, engine: Engine, in_files: QueueTable) -> None:
        self._state = state
        self._engine = engine
        self._first_file = in_files.first_file
        self._checksums = in_files.checksums
        self._chunk = max(1, _CHUNK_BYTES // state.table.page_bytes)

    def near_by_extents(self, pages: Pages, reader: ExtentReader) -> None:
        """The reader joins pages that are neighbors in a file, as their lines are neighbors too."""
        page_bytes, flat = self._state.table.page_bytes, self._state.near.view(-1)
        for start, part in self._chunks(pages):
            lines = np.arange(start, start + len(part))
            try:
                reader.read(*self._locate(part), np.full(len(part), page_bytes), flat, lines * page_bytes)
            except StorageError as error:
                _log.warning("%d hot pages were not preloaded: %s", len(part), error)
                continue
            self._publish(part, lines)

    def near_by_engine(self, pages: Pages) -> None:
        near = self._state.near
        buffer = np.empty((min(self._chunk, max(1, len(pages))), near.shape[1]), np.uint8)
        for start, part in self._chunks(pages):
            rows, lines = buffer[: len(part)], np.arange(start, start + len(part))
            read = self._read(part, rows)
            near[start : start + len(part)] = torch.from_numpy(rows).to(near.device)
            self._publish(part[read], lines[read])

    def far(self, pages: Pages) -> None:
        lines = self._state.far_lines()
        for start, part in self._chunks(pages):
            read = self._read(part, lines[start : start + len(part)])
            self._publish(part[read], (self._state.device_lines + start + np.arange(len(part)))[read])

    def _chunks(self, pages: Pages) -> Iterator[tuple[int, Pages]]:
        for start in range(0, len(pages), self._chunk):
            yield start, pages[start : start + self._chunk]

    def _locate(self, pages: Pages) -> tuple[npt.NDArray[np.uint32], Pages]:
        shards = len(self._state.table.shard_paths)
        files = (self._first_file + pages % shards).astype(np.uint32)
        return files, pages // shards * self._state.table.page_bytes

    def _read(self, pages: Pages, out: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Read pages; returns bool[n], whether each was read."""
        files, offsets = self._locate(pages)
        ok = self._engine.read(files, offsets, out.shape[1], out) == 0
        if self._checksums is not None:
            ok &= _core.crc32c(out) == self._checksums[pages]
        if not ok.all():
            _log.warning(
                "%d of %d hot pages of table '%s' cannot be read; minibatches that need them will fail",
                np.count_nonzero(~ok),
                len(pages),
                self._state.table.name,
            )
        return np.asarray(ok)

    def _publish(self, pages: Pages, lines: Pages) -> None:
        device = self._state.words.device
        at, line = torch.from_numpy(pages).to(device), torch.from_numpy(lines).to(device)
        self._state.words[at] = self._state.words[at] | line << _core.LINE_SHIFT | RESIDENT
        self._state.owners[line] = at + 1


def _hottest(heat: npt.NDArray[np.uint8] | None, page_count: int, count: int) -> Pages:
    """The `count` hottest pages, ascending; among equally hot pages the first ones."""
    count = min(count, page_count)
    if heat is None or count == 0:
        return np.arange(count, dtype=np.int64)
    by_heat = np.zeros(_core.HEAT_LEVELS, np.int64)
    for start in range(0, page_count, _BLOCK):
        by_heat += np.bincount(heat[start : start + _BLOCK], minlength=_core.HEAT_LEVELS)
    hotter = np.cumsum(by_heat[::-1])[::-1]  # pages of this heat or more
    cut = int(np.flatnonzero(hotter >= count)[-1])
    above = np.flatnonzero(heat > cut)
    level = np.flatnonzero(heat == cut)[: count - len(above)]
    pages: Pages = np.union1d(above, level).astype(np.int64)
    return pages


def _warm(pages: Pages, heat: npt.NDArray[np.uint8] | None) -> Pages:
    if heat is None:
        return pages[:0]
    return pages[heat[pages] > 0]


def _in_files(pages: Pages, shards: int) -> Pages:
    """Sorted by shard, then page."""
    return pages[np.lexsort((pages, pages % shards))]
