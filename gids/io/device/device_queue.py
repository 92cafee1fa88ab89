"""The request queue: kernels request pages, a host thread reads them, a copy engine brings them.

Called by the GPU cache. Knows tables as files of pages, but not lines, steps or rows. The words in memory are
described in native/include/gids/request_queue.h, the host thread in native/io/queue_service.h.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.closing import Closing
from gids.cuda.device import CACHE_PRIORITY, Device, Event, Mapping, Stream
from gids.cuda.host_memory import prefer_node
from gids.io.engine import Engine

_UNIT = "io/request_queue.cu"
_THREADS = 256
_BLOCKS_PER_SM = 8
_SLOT_UNIT: int = _core.QUEUE_SLOT_UNIT
ROUNDS = 4
"""Rounds that are posted at the same time, if there are at most two tables."""
_BUFFERS = 2
"""One is filled by the copy engine while kernels take the other one's pages."""


class QueueTable(NamedTuple):
    """The location of a table's pages in the engine's files.

    Page p is in file ``first_file + p % file_count`` at byte ``p // file_count * page_bytes``. checksums:
    uint32[page_count], CRC32C of each page, or None. A page that does not match gets the error EBADMSG.
    """

    page_count: int
    first_file: int
    file_count: int
    page_bytes: int
    checksums: npt.NDArray[np.uint32] | None = None


class Round(NamedTuple):
    """The pages of a round in device memory, for kernels on the queue's stream.

    number: of the round. pages: uint8[n], the page of request i at i * page_bytes. answer: int64[n], for
    ``queue::outcome(answer, number, i)``, the error of request i, or 0.
    """

    number: int
    pages: torch.Tensor
    answer: torch.Tensor


class _Posted(NamedTuple):
    number: int
    table: int
    event: Event


def _answer_words(requests: int) -> int:
    return 1 + -(-requests // 2)


def rounds_of(tables: int) -> int:
    """The rounds that a queue for this many tables has: at least two for each, up to a limit."""
    return min(max(ROUNDS, 2 * tables), _core.QUEUE_ROUNDS_MAX)


def queue_device_bytes(staging_bytes: int, page_bytes: Sequence[int]) -> int:
    """Upper bound of the device memory of a queue. page_bytes: of each table."""
    round_bytes = staging_bytes // rounds_of(len(page_bytes))
    errors = 4 * (round_bytes // max(page_bytes))
    return _BUFFERS * (round_bytes + errors) + (1 << 14)


class DeviceQueue(Closing):
    """A queue pair that a device posts to and a host thread serves with an :class:`~gids.io.Engine`.

    For each round, call ``post``; then ``take``, in the same order, and launch kernels that use its pages.
    Call ``close`` at the end. Kernels run on one stream, given at construction; the queue copies on a stream
    of its own and orders the two. One thread calls these. The service thread calls neither CUDA nor Python.
    In a forked child every call raises RuntimeError, and ``close`` does nothing.

    A request is the number of a page of the round's table. Each gets an error: 0, an errno of the engine,
    EINVAL (no such table or page), EBADMSG (wrong checksum), ETIMEDOUT (not read within timeout_s, or its
    memory is still used by a read that timed out) or ECANCELED (the queue is closed or broken). The queue
    continues after such errors. It is broken for good only if a kernel gave up waiting for a service that did
    not answer long after the time-out. Then posted requests end with an error, and ``post`` raises
    RuntimeError.
    """

    round_max: int
    """The most requests of one round."""
    rounds_max: int
    """The most rounds that are posted and not taken."""

    def __init__(
        self,
        device: Device,
        engine: Engine,
        tables: Sequence[QueueTable],
        *,
        stream: Stream,
        staging_bytes: int = 256 << 20,
        timeout_s: float = 30.0,
        spin_limit_s: float | None = None,
    ) -> None:
        """Allocate the memory, register it with the device and the engine, start the service.

        tables: up to 32768; rounds name them by index. stream: of all kernels. staging_bytes: pinned host
        memory for pages in flight, divided by the rounds; two rounds fit into its device memory.
        spin_limit_s: seconds until a kernel that polls gives up (default: twice timeout_s).

        Raises ValueError for numbers that do not fit each other, the engine or its files. The engine keeps
        the staging memory until it closes, as it may still read into it.
        """
        assert tables
        self.rounds_max = rounds_of(len(tables))
        self._memory = _core.QueueMemory(
            staging_bytes=staging_bytes,
            slot_bytes=max(-(-t.page_bytes // _SLOT_UNIT) * _SLOT_UNIT for t in tables),
            rounds_max=self.rounds_max,
            spin_ns=math.ceil((2 * timeout_s if spin_limit_s is None else spin_limit_s) * 1e9),
        )
        prefer_node(self._memory.address, self._memory.shared_bytes, device.numa_node)
        self.round_max = self._memory.round_max
        self._page_bytes = [t.page_bytes for t in tables]
        self._device, self._stream = device, stream
        # Of the priority of the stream: no other stream may share a channel with one that waits for a word.
        self._copies = device.new_stream(CACHE_PRIORITY)
        self._service = _core.QueueService(
            engine.native, list(tables), self._memory, timeout_ms=math.ceil(timeout_s * 1e3)
        )
        try:
            address, nbytes = self._memory.address, self._memory.shared_bytes
            self._mapping: Mapping = device.map_host(address, nbytes, memory=self._memory)
            with device.use(stream):
                self._local = device.zeros((self._memory.local_bytes,), torch.uint8)
                record = self._memory.pair(self._mapping.device_address, self._local.data_ptr())
                self._pair = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device.torch_device)
                self._buffers = [self._buffer() for _ in range(_BUFFERS)]
            device.preload(_UNIT)
        except BaseException:
            self._service.close()
            raise
        self._posted = 0
        self._rounds: deque[_Posted] = deque()  # posted and not taken
        self._used = stream.record_event()  # before it, kernels used the buffer that is filled next
        self._pid = os.getpid()
        kept = (self._memory, self._local, self._pair)
        streams = (stream, self._copies)
        self._end = weakref.finalize(self, _end, self._pid, self._service, self._mapping, streams, kept)

    def _buffer(self) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self._device.empty((self.round_max * self._memory.slot_bytes,), torch.uint8)
        answer = self._device.empty((_answer_words(self.round_max),), torch.int64)
        for tensor in (pages, answer):
            self._device.hand_over(tensor, self._stream, self._copies)
        return pages, answer

    @property
    def room(self) -> int:
        """The number of rounds that may be posted before one is taken."""
        return self.rounds_max - len(self._rounds)

    def post(self, table: int, requests: torch.Tensor, count: torch.Tensor, first: int) -> None:
        """Enqueue a kernel that posts ``requests[first : min(count, first + round_max)]`` as one round.

        table: index of the table. requests: int64[n] on the device, pages. count: int64[1] on the device, at
        most n, read by the kernel; with count <= first the round is empty. Neither may change or be freed
        before the kernel has run. Does not block. Every round must be taken, even if it is empty or no longer
        wanted. Raises RuntimeError if the queue is closed or broken.
        """
        self._check_open("post")
        assert self.room > 0, "take a round before posting another one"
        assert requests.dtype == count.dtype == torch.int64
        number = self._service.arm()
        try:
            blocks = -(-min(self.round_max, max(0, len(requests) - first)) // _THREADS)
            self._launch(self._stream, "gids_post_round", blocks, number, table, requests, count, first)
        except BaseException:
            self._service.close()  # it would wait for a doorbell that never rings
            raise
        self._posted += 1
        self._rounds.append(_Posted(number, table, self._stream.record_event()))

    def take(self, size: int) -> Round:
        """Enqueue the copy of the oldest round's first `size` pages, once it is answered. Does not block.

        size: number of the round's requests, or 0: the round is only waited for. The queue's stream waits for
        the copy. Kernels that use the pages must be enqueued before the next call; that of the call after it
        overwrites them. Raises RuntimeError if the queue is closed.
        """
        self._check_open("take")
        posted = self._rounds.popleft()
        answer_at, pages_at = self._memory.offsets(posted.number)
        pages, answer = self._buffers[posted.number % _BUFFERS]
        used, self._used = self._used, self._stream.record_event()
        word = self._mapping.device_address + answer_at
        with self._device.batch(self._copies):
            self._copies.wait_event(posted.event)
            self._copies.wait_event(used)
            if not self._device.wait_value(self._copies, word, posted.number + 1 << _core.QUEUE_COUNT_BITS):
                self._launch(self._copies, "gids_await_round", 1, posted.number)
            if size:
                pages, answer = pages[: size * self._page_bytes[posted.table]], answer[: _answer_words(size)]
                self._device.copy_from_host(self._copies, pages, self._memory.address + pages_at)
                self._device.copy_from_host(self._copies, answer, self._memory.address + answer_at)
            copied = self._copies.record_event()
        self._stream.wait_event(copied)
        return Round(posted.number, pages, answer)

    def close(self) -> None:
        """Stop the service, wait for the streams, unpin the memory, free the device memory.

        Waits for issued requests, at most until they time out; the others get ECANCELED. Enqueued waits pass.
        Blocks until the enqueued kernels have run. Idempotent. Garbage collection and the end of the
        interpreter close the queue too.
        """
        if os.getpid() == self._pid:
            self._end()
            self._buffers = []

    def stats(self) -> dict[str, int]:
        """Counters since it opened.

        taken: requests that the service took. failed: requests with an error, of these timed_out and corrupt.
        late: completions after the time-out. rounds: answered. sleeps: how often the service slept. posted:
        rounds. untaken: rounds now.
        """
        return self._service.stats() | {"posted": self._posted, "untaken": len(self._rounds)}

    def memory(self) -> dict[str, int]:
        """Bytes: "staging" (pinned host memory, including the rings) and "queue" (device memory)."""
        buffers = sum(tensor.nbytes for buffer in self._buffers for tensor in buffer)
        return {
            "staging": self._memory.shared_bytes,
            "queue": self._local.nbytes + self._pair.nbytes + buffers,
        }

    def _check_open(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the request queue was opened before a fork: open a new one in this process")
        if not self._end.alive:
            raise RuntimeError(f"{what}: the request queue is closed")

    def _launch(self, stream: Stream, kernel: str, blocks: int, *args: torch.Tensor | int) -> None:
        blocks = max(1, min(blocks, self._device.sm_count * _BLOCKS_PER_SM))
        self._device.launch(stream, _UNIT, kernel, blocks, _THREADS, self._pair, *args)


def _end(
    pid: int, service: _core.QueueService, mapping: Mapping, streams: Sequence[Stream], kept: tuple[Any, ...]
) -> None:
    """close() without the queue. kept: memory that kernels use until the streams are done."""
    if os.getpid() != pid:
        return
    try:
        service.close()  # all enqueued waits pass now
        for stream in streams:
            stream.synchronize()
    finally:
        mapping.close()
        del kept
