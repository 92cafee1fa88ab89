"""The reads of a cache on a device. Called by DeviceFeatureCache.

Reads: those of planned minibatches, as rounds of the request queue: first posted, first collected. It knows
which round holds which missing pages, but not why they are missing.

preload: fills lines with the hottest pages before the first minibatch. GPUDirect Storage reads long runs of
pages where the machine has it. The engine reads the others into pinned host memory, from where they are
copied. A page that cannot be read stays out of the cache. The minibatch that needs it gets the error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.kernels import CacheKernels, Plan
from gids.cache.device.state import RESIDENT, Counters, HostArray, TableState
from gids.errors import StorageError
from gids.io.device.device_queue import DeviceQueue

if TYPE_CHECKING:
    from gids.cuda import Device
    from gids.io import Engine
    from gids.io.device.device_queue import QueueTable
    from gids.io.device.kvikio_reader import KvikioReader

_log = logging.getLogger("gids")
_CHUNK_BYTES = 32 << 20
_BLOCK = 1 << 24  # bincount makes 8 bytes of each page's heat

Pages = npt.NDArray[np.int64]


class Reads:
    """Posts rounds and takes their pages. Enqueues kernels on the stream and never blocks."""

    def __init__(self, queue: DeviceQueue, kernels: CacheKernels, counters: Counters) -> None:
        self._queue = queue
        self._kernels = kernels
        self._counters = counters
        self._rounds: deque[Plan] = deque()  # of each round that is posted and not collected

    def rounds_for(self, misses: int) -> int:
        """Number of rounds for this number of missing pages."""
        return -(-misses // self._queue.round_max)

    @property
    def full(self) -> bool:
        """Whether a round must be collected before the next is posted."""
        return self._queue.room == 0

    def post(self, plan: Plan) -> None:
        """Post the next round of a plan's misses. There must be room."""
        count = self._counters.misses(plan.index, plan.state.table.name)
        first = plan.posted * self._queue.round_max
        self._queue.post(plan.state.number, plan.buffers.requests, count, first)
        self._rounds.append(plan)
        plan.posted += 1

    def settle(self, plan: Plan) -> int:
        """Note what a plan misses, and return the rounds that it needs. The host has seen its counters."""
        plan.missing = self._counters.seen(plan.index, plan.state.table.name, "misses")
        return self.rounds_for(plan.missing)

    def collect(self) -> None:
        """Copy the oldest round's pages into lines, and rows of pages without a line to the output.

        Its plan must be settled: the host knows the size of the round.
        """
        plan = self._rounds[0]
        assert plan.missing is not None
        first = plan.collected * self._queue.round_max
        size = max(0, min(self._queue.round_max, plan.missing - first))
        pages = self._queue.take(size)
        self._rounds.popleft()
        plan.collected += 1
        if size:
            self._kernels.take(plan, first, size, pages)

    def abandon(self, plans: Sequence[Plan]) -> None:
        """Give up the plans of the oldest step: wait for its reads, free the lines of missing pages."""
        firsts = [plan.collected * self._queue.round_max for plan in plans]
        while any(plan.collected < plan.posted for plan in plans):
            plan = self._rounds.popleft()
            plan.collected += 1
            with suppress(RuntimeError):  # the queue is closed or broken: no more pages come
                self._queue.take(0)
        for plan, first in zip(plans, firsts, strict=True):
            if first < plan.most_misses:
                self._kernels.take(plan, first, plan.most_misses - first, None)


def preload(
    device: Device,
    state: TableState,
    engine: Engine,
    in_files: QueueTable,
    *,
    heat: npt.NDArray[np.uint8] | None,
    kvikio: KvikioReader | None,
) -> None:
    """Fill lines in device memory with the hottest pages, and lines in host memory with the next.

    Pages without heat go only into lines that are never replaced; those are always filled.
    in_files: the table's pages in the engine's files, and checksums to compare. kvikio: reads long runs of
    pages, if there are no checksums. torch's current stream must be the cache's. Blocks.
    """
    page_count = state.table.page_count
    near = _hottest(heat, page_count, state.device_lines)
    far = np.setdiff1d(_hottest(heat, page_count, state.line_count), near, assume_unique=True)
    near = _warm(near, heat)
    if state.replaced > state.device_lines:
        far = _warm(far, heat)
    near, far = (_in_files(pages, len(state.table.shard_paths)) for pages in (near, far))
    loader = _Loader(device, state, engine, in_files)
    loader.near(near, kvikio if in_files.checksums is None else None)
    loader.far(far)
    if loader.failed:
        _log.warning(
            "%d of the hottest pages of table '%s' cannot be read; minibatches that need them will fail",
            loader.failed,
            state.table.name,
        )


class _Loader:
    """Reads pages of one table into its lines. failed: the number of pages that could not be read."""

    def __init__(self, device: Device, state: TableState, engine: Engine, in_files: QueueTable) -> None:
        self._device = device
        self._state = state
        self._engine = engine
        self._first_file = in_files.first_file
        self._checksums = in_files.checksums
        self._chunk = max(1, _CHUNK_BYTES // state.table.page_bytes)
        self.failed = 0

    def near(self, pages: Pages, kvikio: KvikioReader | None) -> None:
        """Pages go to the lines in device memory, first those that kvikio reads: in runs that are long enough
        for it. The engine reads the others, and all that remain after an error of kvikio.
        """
        done = 0
        if kvikio is not None:
            run_pages = np.diff(self._runs(pages), append=len(pages))
            long = np.repeat(run_pages * self._state.table.page_bytes >= kvikio.threshold, run_pages)
            pages = np.concatenate((pages[long], pages[~long]))
            done = self._near_by_kvikio(pages[: np.count_nonzero(long)], kvikio)
        self._near_by_engine(pages, done)

    def _near_by_kvikio(self, pages: Pages, kvikio: KvikioReader) -> int:
        """Returns how many of the pages, from the first one, were read."""
        page_bytes, flat = self._state.table.page_bytes, self._state.near.view(-1)
        for start, part in self._chunks(pages):
            first = self._runs(part)
            lengths = np.diff(first, append=len(part)) * page_bytes
            try:
                kvikio.read(*self._locate(part[first]), lengths, flat, (start + first) * page_bytes)
            except StorageError as error:
                _log.info("hot pages are read through host memory: %s", error)
                return start
            self._publish(part, start + np.arange(len(part)))
        return len(pages)

    def _near_by_engine(self, pages: Pages, done: int) -> None:
        """The engine fills one half of pinned memory while the other half is copied."""
        if done == len(pages):
            return
        near, stream = self._state.near, self._device.current_stream()
        memory = HostArray(self._device, 2 * min(self._chunk, len(pages) - done) * near.shape[1])
        halves = memory.bytes.reshape(2, -1, near.shape[1])
        try:
            for number, (start, part) in enumerate(self._chunks(pages, done)):
                rows, lines = halves[number % 2, : len(part)], start + np.arange(len(part))
                read = self._read(part, rows)
                self._publish(part[read], lines[read])
                stream.synchronize()  # the engine fills the other half next
                self._device.copy_from_host(stream, near[start : start + len(part)], rows.ctypes.data)
        finally:
            stream.synchronize()
            memory.close()

    def far(self, pages: Pages) -> None:
        lines = self._state.far_lines()
        for start, part in self._chunks(pages):
            read = self._read(part, lines[start : start + len(part)])
            self._publish(part[read], (self._state.device_lines + start + np.arange(len(part)))[read])

    def _chunks(self, pages: Pages, done: int = 0) -> Iterator[tuple[int, Pages]]:
        for start in range(done, len(pages), self._chunk):
            yield start, pages[start : start + self._chunk]

    def _runs(self, pages: Pages) -> Pages:
        """The position of the first page of each run of neighbors in a file. pages: as they are in files."""
        shards = len(self._state.table.shard_paths)
        return np.flatnonzero(np.diff(pages, prepend=-2 * shards) != shards)

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
        self.failed += int(np.count_nonzero(~ok))
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
