"""The request queue: kernels request pages, host threads read them, the stream or the warps wait.

Called by the GPU cache. Knows tables as files of pages, but not lines, steps or rows. The words in memory are
described in native/include/gids/request_queue.h, the host threads in native/io/queue_service.h.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.closing import Closing
from gids.cuda.device import Argument, Device, Event, Mapping, Stream
from gids.cuda.host_memory import prefer_node
from gids.io.engine import Engine

_UNIT = "io/request_queue.cu"
_THREADS = 256
_WARPS = _THREADS // 32
_SLOT_UNIT: int = _core.QUEUE_SLOT_UNIT
_BLOCKS_PER_SM = 8
BUS_BLOCKS = 32
"""The most blocks of a kernel that is bounded by the bus. Bandwidth times delay is about 80 KB, which a few
blocks have in flight; more would only keep registers from the kernels of training."""
_SPINNING_THREADS = 1024
_SPINNING_WARPS = _SPINNING_THREADS // 32
_SPINNING_WARPS_PER_SM = 8
"""The warps of a kernel that polls. They fill a quarter of the multiprocessors; the others stay free."""


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


def requests_of(table: int, pages: torch.Tensor) -> torch.Tensor:
    """The requests, int64[n], for pages, int64[n], of a table (its index in the queue's tables)."""
    if not 0 <= table < _core.QUEUE_TABLES_MAX:
        raise ValueError(f"table must be 0 to {_core.QUEUE_TABLES_MAX - 1} (got {table})")
    return pages | table << _core.QUEUE_TABLE_SHIFT


@dataclass(eq=False)
class Round:
    """The requests that one kernel posted. Their pages stay in the queue until they are collected.

    number: the round's number for kernels. pair: uint8 tensor in device memory that holds one
    ``gids::queue::Pair``; kernels take its address as ``const queue::Pair*``. Made by
    :meth:`DeviceQueue.post`.
    """

    _owner: _core.QueueService
    index: int
    """Over all pairs."""
    number: int
    pair: torch.Tensor
    _limit: int  # the most requests that it holds
    _posted: Event | None = None
    _waited_on: list[Stream] = field(default_factory=list)
    _collected: bool = False


class DeviceQueue(Closing):
    """Queue pairs that a device posts to and host threads serve with an :class:`~gids.io.Engine`.

    For each round, call ``post``, ``wait``, then launch a kernel that reads the staging pages (or call
    ``collect``), then ``collected``. Or call ``read_pages``. Call ``close`` at the end. One thread at a time
    may call these, any thread ``close``; inside ``reading`` a kernel is safe from ``close``. The service
    thread calls neither CUDA nor Python. Everything is enqueued on the streams that the caller passes, which
    may differ from call to call; the queue orders them where its memory requires it. In a forked child every
    call raises RuntimeError, and ``close`` does nothing.

    A request is ``table << 48 | page`` (:func:`gids.io.device.requests_of`). Each gets an error: 0, an errno
    of the engine, EINVAL (no such table or page), EBADMSG (wrong checksum), ETIMEDOUT (not read within
    timeout_s), ECANCELED (the queue is closed or broken) or EAGAIN (wait "warp": no slot came free). The
    queue continues after such errors. It is broken for good only if a kernel gave up waiting for a service
    that did not answer long after the time-out. Then posted requests end with an error, and ``post`` and
    ``read_pages`` raise RuntimeError.
    """

    wait_kind: str
    """ "stream" or "warp"."""
    pairs: int
    depth: int
    """Slots of a pair."""
    slot_bytes: int
    """Bytes of a staging page: the largest page, rounded up to a multiple of 16."""
    round_max: int
    """The most requests of one round."""
    rounds_max: int
    """The most rounds that are posted and not collected, over all pairs."""

    def __init__(
        self,
        device: Device,
        engine: Engine,
        tables: Sequence[QueueTable],
        *,
        staging_bytes: int = 256 << 20,
        rounds_max: int = 4,
        pairs: int = 1,
        wait: Literal["stream", "warp"] = "stream",
        timeout_s: float = 30.0,
        spin_limit_s: float | None = None,
    ) -> None:
        """Allocate the memory, register it with the device and the engine, start the service.

        tables: up to 32768; requests name them by index. staging_bytes: pinned host memory for pages in
        flight, over all pairs; a pair gets as many slots as fit, rounded down to a power of two.
        rounds_max: 1 to 64 per pair. wait: "stream" lets the stream wait for whole rounds; with "warp" (BaM's
        way) each warp of ``read_pages`` polls for its own page. spin_limit_s: seconds until a kernel that
        polls gives up (default: twice timeout_s).

        Raises ValueError for numbers that do not fit each other, the engine or its files. The engine keeps
        the staging memory until it closes, as it may still read into it.
        """
        assert tables
        assert wait in ("stream", "warp")
        assert 1 <= rounds_max <= _core.QUEUE_DOORBELLS * pairs
        pair_rounds = -(-rounds_max // pairs)
        self._memory = _core.QueueMemory(
            staging_bytes=staging_bytes,
            slot_bytes=max(-(-t.page_bytes // _SLOT_UNIT) * _SLOT_UNIT for t in tables),
            pairs=pairs,
            rounds_max=pair_rounds,
            spin_ns=math.ceil((2 * timeout_s if spin_limit_s is None else spin_limit_s) * 1e9),
        )
        prefer_node(self._memory.address, self._memory.shared_bytes, device.numa_node)
        self.wait_kind = wait
        self.pairs = pairs
        self.depth = self._memory.depth
        self.slot_bytes = self._memory.slot_bytes
        self.round_max = self.depth // pair_rounds
        self.rounds_max = rounds_max
        self._device = device
        with contextlib.ExitStack() as undo:
            self._service = _core.QueueService(
                engine.native,
                list(tables),
                self._memory,
                timeout_ms=math.ceil(timeout_s * 1e3),
            )
            undo.callback(self._service.close)
            address, nbytes = self._memory.address, self._memory.shared_bytes
            self._mapping: Mapping = device.map_host(address, nbytes, memory=self._memory)
            undo.callback(self._mapping.close)
            self._local = device.zeros((self._memory.local_bytes,), torch.uint8)
            self._pairs = self._device_pairs()
            device.preload(_UNIT)
            device.current_stream().synchronize()  # zeroed, before any other stream uses it
            undo.pop_all()

        self._lock = threading.RLock()
        self._streams: list[Stream] = []  # all that were used
        self._posted = 0
        self._last_post: Event | None = None
        self._uncollected: deque[Round] = deque()
        self._freed: dict[int, list[Event]] = {}  # by round: what the post that reuses its slots waits for
        self._reuse_distance = pair_rounds * pairs
        self._pid = os.getpid()
        kept = (self._memory, self._local, self._pairs)
        self._end = weakref.finalize(self, _end, self._pid, self._service, self._mapping, self._streams, kept)

    def _device_pairs(self) -> torch.Tensor:
        shared, local = self._mapping.device_address, self._local.data_ptr()
        records = b"".join(self._memory.pair(p, shared, local) for p in range(self.pairs))
        flat = torch.frombuffer(bytearray(records), dtype=torch.uint8)
        return flat.reshape(self.pairs, -1).to(self._device.torch_device)

    # --- wait "stream" ---

    def post(
        self, stream: Stream, requests: torch.Tensor, count: torch.Tensor, first: int, most: int | None = None
    ) -> Round:
        """Enqueue a kernel that posts ``requests[first : min(count, first + most)]`` as one round.

        requests: int64[n] on the device. count: int64[1] on the device, at most n, read by the kernel; with
        count <= first the round is empty. Neither may change or be freed before the kernel has run. most:
        up to round_max, the default. Does not block. Every round must be waited for and collected, even if it
        is empty or no longer wanted. Round r goes to pair r % pairs.

        Raises RuntimeError while rounds_max rounds are not collected, or if the queue is closed or broken.
        """
        with self._use("stream", "post"):
            self._check_requests(requests, count, first)
            if self.room == 0:
                raise RuntimeError(
                    f"rounds_max={self.rounds_max} rounds are posted and not collected: wait for the oldest "
                    "one and collect it before posting"
                )
            pair = self._posted % self.pairs
            number = self._service.arm(pair)
            limit = min(self.round_max if most is None else most, self.round_max, len(requests) - first)
            round = Round(self._service, self._posted, number, self._pairs[pair], max(limit, 0))
            what = (round.pair, number, requests, count, first, round._limit)
            with self._posting(stream, self._freed.pop(self._posted - self._reuse_distance, [])):
                self._launch(stream, "gids_post_round", -(-round._limit // _THREADS), *what)
            round._posted = self._last_post
            self._uncollected.append(round)
            return round

    @property
    def room(self) -> int:
        """The number of rounds that may be posted before one is collected."""
        return self.rounds_max - len(self._uncollected)

    def wait(self, stream: Stream, round: Round) -> None:
        """Let the stream wait until every request of the round is answered. Does not block.

        Later kernels on the stream may call ``queue::outcome(*pair, ticket)`` with ``ticket =
        queue::ticket_of(*pair, round, i)``; if it returns 0, they may read ``pair->page(ticket)``. Several
        streams may wait for one round.
        """
        with self._use("stream", "wait"):
            self._check_round(round)
            if round._collected:
                raise RuntimeError(f"round {round.number} is already collected: its pages may be overwritten")
            assert round._posted is not None
            self._remember(stream)
            stream.wait_event(round._posted)  # for what the posting kernel wrote to device memory
            completed = self._mapping.device_address + self._memory.offsets(round.index % self.pairs)[0]
            if not self._device.wait_value(stream, completed, round.number + 1):
                self._launch(stream, "gids_await_round", 1, round.pair, round.number)
            if stream not in round._waited_on:
                round._waited_on.append(stream)

    def collect(
        self,
        stream: Stream,
        round: Round,
        count: torch.Tensor,
        first: int,
        to: torch.Tensor,
        errors: torch.Tensor,
    ) -> None:
        """Enqueue a kernel that copies the pages of a round that the stream waited for. Does not block.

        count, first: as passed to ``post``. The page of ``requests[first + i]`` goes to ``to[i]``, its error
        to ``errors[i]``; rows with an error do not change. to: uint8[rows, bytes] on the device, contiguous,
        for the first bytes of the first pages. errors: int32[rows] on the device.
        """
        with self._use("stream", "collect"):
            self._check_round(round, stream, "collect")
            limit = min(self._check_output(to, errors), round._limit)
            what = (round.pair, round.number, count, first, limit, to, to.shape[1], errors)
            self._launch(stream, "gids_collect_round", min(-(-limit // _WARPS), BUS_BLOCKS), *what)

    def copy(
        self, stream: Stream, round: Round, ticket: int, pages: torch.Tensor, statuses: torch.Tensor
    ) -> None:
        """Enqueue copies, by a copy engine, of a round that the stream waited for. Does not block.

        ticket: of the round's first request, the number of requests posted to its pair before. pages:
        uint8[size, slot_bytes] on the device, for the staging pages of the round's first `size` requests.
        statuses: int64[size] on the device; ``queue::outcome_of`` gives their errors. A round is contiguous
        in the ring, so its pages take one copy, or two at the ring's end.
        """
        with self._use("stream", "copy"):
            self._check_round(round, stream, "copy")
            _, statuses_at, staging_at = self._memory.offsets(round.index % self.pairs)
            slot, done = ticket % self.depth, 0
            while done < len(pages):
                part = slice(done, min(len(pages), done + self.depth - slot))
                for to, start in ((pages, staging_at), (statuses, statuses_at)):
                    address = self._memory.address + start + slot * to[:1].nbytes
                    self._device.copy_from_host(stream, to[part], address)
                slot, done = 0, part.stop

    @contextlib.contextmanager
    def reading(self, stream: Stream, round: Round) -> Iterator[None]:
        """A context: ``wait``, then the caller enqueues the reads of the pages, then ``collected``.

        A ``close`` in another thread waits for its end. After an error inside, the round is not collected.
        """
        with self._use("stream", "reading"):
            self.wait(stream, round)
            yield
            self.collected(round)

    def collected(self, round: Round) -> None:
        """Declare that the last kernel that reads the round's pages is enqueued, on a stream that waited.

        Frees the round's slots for ``post``, once the rounds before it are collected too.
        Idempotent. Raises RuntimeError if no stream waited for the round, as its pages may not be read yet.
        """
        with self._use("stream", "collected"):
            self._check_round(round)
            if round._collected:
                return
            if not round._waited_on:
                raise RuntimeError(f"round {round.number}: call wait() before collected()")
            round._collected = True
            self._freed[round.index] = [stream.record_event() for stream in round._waited_on]
            while self._uncollected and self._uncollected[0]._collected:
                self._uncollected.popleft()

    # --- both waits ---

    def read_pages(
        self,
        stream: Stream,
        requests: torch.Tensor,
        count: torch.Tensor,
        first: int,
        to: torch.Tensor,
        errors: torch.Tensor,
    ) -> None:
        """Enqueue the reading of ``requests[first : min(count, first + len(to))]``. Does not block.

        With wait "warp" one kernel posts, waits and copies. With "stream" the rows of ``to`` are split into
        rounds; at least one must be free. requests, count: as for ``post``. to, errors: as for ``collect``.
        """
        with self._use(None, "read_pages"):
            self._check_requests(requests, count, first)
            rows = self._check_output(to, errors)
            if self.wait_kind == "warp":
                numbers = [self._service.arm(pair) for pair in range(self.pairs)]
                assert len(set(numbers)) == 1, "all pairs are armed together"
                most = -(-self._device.sm_count * _SPINNING_WARPS_PER_SM // _SPINNING_WARPS)
                grid = (max(1, min(-(-rows // _SPINNING_WARPS), most)), _SPINNING_THREADS)
                what = (requests, count, first, rows, to, to.shape[1], errors)
                with self._posting(stream, []):
                    pairs = (self._pairs, self.pairs, numbers[0])
                    self._device.launch(stream, _UNIT, "gids_read_pages", *grid, *pairs, *what)
                return
            ahead: deque[tuple[Round, int]] = deque()  # as many as there is room for
            begins = iter(range(0, rows, self.round_max))
            while True:
                while (self.room or not ahead) and (begin := next(begins, None)) is not None:
                    round = self.post(stream, requests, count, first + begin, rows - begin)
                    ahead.append((round, begin))
                if not ahead:
                    break
                round, begin = ahead.popleft()
                part = slice(begin, begin + self.round_max)
                self.wait(stream, round)
                self.collect(stream, round, count, first + begin, to[part], errors[part])
                self.collected(round)

    # --- close, statistics ---

    def close(self) -> None:
        """Stop the service, release every waiter, wait for the streams that were used, unpin the memory.

        Waits for issued requests, at most until they time out; the others get ECANCELED. Enqueued waits pass.
        Blocks until the enqueued kernels have run. Idempotent, from any thread. Garbage collection and the
        end of the interpreter close the queue too.
        """
        if os.getpid() == self._pid:
            self._service.close()  # without the lock, to release a thread that waits within a call
            with self._lock:
                self._end()

    def stats(self) -> dict[str, int]:
        """Counters since it opened.

        taken: requests that the service took. failed: requests with an error, of these timed_out and corrupt.
        late: completions after the time-out. rounds: complete rounds over all pairs. sleeps: how often the
        service slept. posted: rounds (kernels for wait "warp"). uncollected: rounds now.
        """
        return self._service.stats() | {"posted": self._posted, "uncollected": len(self._uncollected)}

    def memory(self) -> dict[str, int]:
        """Bytes: "staging" (pinned host memory, including the rings) and "queue" (device memory)."""
        return {"staging": self._memory.shared_bytes, "queue": self._local.nbytes + self._pairs.nbytes}

    def __repr__(self) -> str:
        return (
            f"<gids.io.DeviceQueue wait {self.wait_kind!r}: {self.pairs} pair(s) of {self.depth} slots of "
            f"{self.slot_bytes} B, rounds of {self.round_max}, {self.rounds_max} ahead>"
        )

    # --- order, checks ---

    @contextlib.contextmanager
    def _use(self, kind: str | None, what: str) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise RuntimeError("the request queue was opened before a fork: open a new one in this process")
        with self._lock:
            if not self._end.alive:
                raise RuntimeError(f"{what}: the request queue is closed")
            if kind and kind != self.wait_kind:
                raise RuntimeError(
                    f"{what} needs a queue with wait={kind!r} (this one has wait={self.wait_kind!r})"
                )
            yield

    @contextlib.contextmanager
    def _posting(self, stream: Stream, freed: list[Event]) -> Iterator[None]:
        """Around the launch of an armed kernel: kernels post one at a time, into free slots."""
        self._remember(stream)
        self._posted += 1
        try:
            for event in freed if self._last_post is None else [self._last_post, *freed]:
                stream.wait_event(event)
            yield
            self._last_post = stream.record_event()
        except BaseException:
            self._service.close()  # it would wait for a doorbell that never rings
            raise

    def _launch(self, stream: Stream, kernel: str, blocks: int, *args: Argument) -> None:
        blocks = max(1, min(blocks, self._device.sm_count * _BLOCKS_PER_SM))
        self._device.launch(stream, _UNIT, kernel, blocks, _THREADS, *args)

    def _remember(self, stream: Stream) -> None:
        if stream not in self._streams:
            self._streams.append(stream)

    def _check_round(self, round: Round, stream: Stream | None = None, what: str = "") -> None:
        """stream: must have waited for the round, for a method."""
        if round._owner is not self._service:
            raise ValueError(f"round {round.number} belongs to another queue")
        if stream is not None and (round._collected or stream not in round._waited_on):
            raise RuntimeError(f"round {round.number}: call {what}() after wait() and before collected()")

    def _check_requests(self, requests: torch.Tensor, count: torch.Tensor, first: int) -> None:
        """Only a bug of the caller can break these; a launch checks where tensors are."""
        assert requests.dtype == count.dtype == torch.int64
        assert requests.dim() == 1
        assert count.shape == (1,)
        assert first >= 0

    def _check_output(self, to: torch.Tensor, errors: torch.Tensor) -> int:
        assert (to.dtype, to.dim()) == (torch.uint8, 2)
        assert to.shape[1] <= self.slot_bytes
        assert (errors.dtype, errors.shape) == (torch.int32, to.shape[:1])
        return len(to)


def _end(
    pid: int, service: _core.QueueService, mapping: Mapping, streams: list[Stream], kept: tuple[Any, ...]
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
