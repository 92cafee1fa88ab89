"""PackedStream: returns sampled minibatches with their features, read by packs where that is faster.

Made by FeatureLoader.attach in place of a WindowedStream. If the epoch will wait for the disk, the stream
samples a superbatch ahead, and PackReads chooses how to read it. While one superbatch is trained, the next
one is prepared. If random reads are cheaper, or packs fail, the stream goes on with a WindowedStream.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

from gids.closing import Closing
from gids.errors import StorageError
from gids.loader.epoch_stream import Sampled
from gids.loader.minibatch_sizes import rows_read
from gids.loader.observer import Observers
from gids.loader.pack_reads import EARLY, LEAST_WAIT_S, MOST_READS_PER_S, PackHost, PackReads
from gids.loader.sampled_ahead import SampledAhead
from gids.loader.stages import Stage
from gids.loader.stream import Failed, Features, IdsOf
from gids.packs import Layout, Space, Superbatch, spaces_of

T = TypeVar("T")
log = logging.getLogger("gids")

_SOON_S = 0.5
"""So many seconds of waiting for the disk show how long the epoch will wait."""

_SPOOL_SHARE = 8
"""The sampled minibatches of a superbatch take at most an eighth of the scratch."""


class PackedStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}), like WindowedStream.

    host: the loader. count: number of minibatches, or None if unknown. on_close: called once.
    """

    def __init__(
        self,
        minibatches: Sampled[T],
        ids_of: IdsOf[T],
        bytes_of: Callable[[T], int],
        host: PackHost,
        packs: PackReads,
        *,
        count: int | None,
        on_close: Callable[[], None],
        seconds: dict[str, float],
        stage: Stage,
        observers: Observers,
    ) -> None:
        self._source = minibatches
        self._ids_of, self._bytes_of, self._host, self._packs = ids_of, bytes_of, host, packs
        self._count, self._size = count, 0  # minibatches of the epoch, and of a superbatch
        self._base = 0  # minibatches before the first superbatch
        self._spaces: list[Space] = []  # of the first minibatch, if it is known
        self._held: list[T] = []  # taken back from random reads
        self._begun = not (packs.options.reads == "auto" and host.together.overlap)
        self._waits: list[float] | None = None  # of the first minibatches, by random reads
        self._seconds, self._profile, self._observers = seconds, stage, observers
        self._window: Any = None
        self._superbatch: Superbatch | None = None  # that is trained
        self._sampled: SampledAhead[T] | None = None  # its minibatches
        self._next: Superbatch | None = None  # that is swept
        self._ahead: SampledAhead[T] | None = None  # its minibatches, or those that are being sampled
        self._tried_next = False
        self._only_random = False  # after this superbatch
        self._end: BaseException | None = None
        self._closed = False
        self._limit: tuple[int, str] | None = None
        self._choice: dict[str, Any] = {"actual_s": 0.0, "returned": 0}
        self._returned_at: float | None = None
        self._opened: list[Any] = []  # what closing needs must not hold the stream itself alive
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._opened, on_close)

    def __next__(self) -> tuple[T, Features]:
        """The next minibatch. The stream goes on after a StorageError and ends with any other error."""
        if self._closed:
            raise StopIteration
        begun, sampled_s = time.perf_counter(), self._seconds["sample"]
        if self._returned_at is not None:
            self._consumed(begun - self._returned_at)
        try:
            return self._take()
        except StorageError:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._returned_at = time.perf_counter()
            self._choice["actual_s"] += self._returned_at - begun - (self._seconds["sample"] - sampled_s)

    @property
    def closed(self) -> bool:
        return self._closed

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window of random reads from now on."""
        self._limit = (batches, reason)
        self._limit_window()

    def _limit_window(self) -> None:
        if self._limit is not None and self._window is not None:
            self._window.limit_window(*self._limit)
            self._limit = self._limit[0], ""  # the reason was logged

    def close(self) -> None:
        """End what runs in the background, drop what was sampled ahead. Idempotent."""
        self._closed = True
        self._end = self._window = self._superbatch = self._sampled = self._next = self._ahead = None
        self._held.clear()
        self._finalizer()

    def _take(self) -> tuple[T, Features]:
        if not self._begun:
            self._begin()
        while self._window is None:
            superbatch = self._superbatch
            if superbatch is not None and superbatch.next < superbatch.end:
                return self._from(superbatch)
            if not self._advance():
                raise self._take_end()
        begun, sampled_s = time.perf_counter(), self._seconds["sample"]
        taken: tuple[T, Features] = next(self._window)
        self._choice["returned"] += 1
        if self._waits is not None:
            self._judge(time.perf_counter() - begun - (self._seconds["sample"] - sampled_s))
        return taken

    def _begin(self) -> None:
        """Begin with random reads, unless no disk could read the epoch soon: then packs are considered."""
        self._begun = True
        first = self._source.peek()
        if first is None or isinstance(first, Failed):
            return
        try:
            ids = self._ids_of(first)
            rows = rows_read(ids, [t.name for t in self._packs.tables])
            self._spaces = spaces_of(self._packs.tables, ids)
        except Exception:  # raised again where this minibatch is due
            return
        if sum(rows.values()) * self._packs.expected_count(self._count) < LEAST_WAIT_S * MOST_READS_PER_S:
            self._packs.release()  # of the epoch before
            self._begin_window(self._source)
            self._waits = []

    def _judge(self, waited_s: float) -> None:
        """Consider packs after EARLY minibatches, or long waiting, if the rest would wait for the disk long.

        The later half of the waits counts: at first the cache is empty.
        """
        assert self._waits is not None
        self._waits.append(waited_s)
        done = len(self._waits)
        if done < EARLY and sum(self._waits) < _SOON_S:
            return
        later = self._waits[done // 2 :]
        self._waits = None
        left = self._packs.expected_count(self._count) - done
        if left * sum(later) / len(later) >= LEAST_WAIT_S and not self._window.ended:
            self._opened.remove(self._window)
            self._base, self._held = done, self._window.take_back()
            self._window = None

    def _from(self, superbatch: Superbatch) -> tuple[T, Features]:
        packs, observers, index = self._packs, self._observers, superbatch.next
        try:
            with self._profile("gather"), observers.stage("gather"):
                minibatch, features, error = superbatch.take()
        except OSError as failed:
            if superbatch.next > index:
                raise  # of one minibatch, which could not be read from scratch
            self._give_up(failed)  # of a pack: its minibatches are read at random
            self._finish_superbatch()
            if self._next is not None:
                self._drop(self._next)
                self._next = None
            self._random(index)
            return self._take()
        if observers.any:
            packs.settle()
            observers.entered(packs.step, self._ids_of(minibatch))
            for event in (observers.planned, observers.gathered, observers.retired):
                event(packs.step)
        packs.step += 1
        packs.counters["minibatches"] += 1
        self._choice["returned"] += 1
        try:
            self._work_ahead(superbatch)
        except OSError as failed:  # of scratch; this minibatch is whole
            self._give_up(failed)
        try:
            if error is not None:
                raise error
            return minibatch, features
        finally:
            del error  # it refers to this frame, and so to this stream

    def _consumed(self, seconds: float) -> None:
        """Keep a moving average of the consumer's seconds per minibatch."""
        learned = self._packs.learned
        before = learned.consumer_s
        learned.consumer_s = seconds if not before else 0.9 * before + 0.1 * seconds

    def _give_up(self, reason: object) -> None:
        """Read at random, once this superbatch is trained, and in later epochs."""
        self._only_random = True
        self._packs.give_up(str(reason))

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None  # not kept: it refers to frames that refer to this stream
        return end or StopIteration()

    # --- one superbatch after the other ---

    def _advance(self) -> bool:
        """Begin the next superbatch, or go on by random reads. False at the end of the minibatches."""
        if self._superbatch is not None:
            done = self._finish_superbatch()
            if done.last_pack < len(done.layout.packs):  # more packs than one superbatch may have
                superbatch = self._make(done.layout, done.last_pack, fill_resident=False)
                return self._random(done.end) if superbatch is None else self._train(superbatch)
            self._end_of_sampled()
            if self._end is not None or self._window is not None:
                return self._window is not None
        prepared, self._next = self._next, None
        sampled = self._next_sampled()
        if sampled is None:
            return self._random(0)
        if not self._size:
            self._start_sampling(sampled)
            if self._window is not None:
                return True
        sampled.sample()
        if not len(sampled.spool):
            self._end_of_sampled()
            return self._window is not None
        if prepared is not None:
            return self._train(prepared)
        begun = time.perf_counter()
        layout = None
        try:
            with self._profile("plan"):
                layout = self._packs.choose(sampled, self._host, self._left(sampled))
        except OSError as error:
            self._give_up(error)
        self._packs.counters["seconds"]["cut"] += time.perf_counter() - begun
        superbatch = None if layout is None else self._make(layout, 0, fill_resident=True)
        return self._random(0) if superbatch is None else self._train(superbatch)

    def _left(self, sampled: SampledAhead[T]) -> int | None:
        """Minibatches of the epoch from this superbatch on, if known."""
        return None if self._count is None else self._count - sampled.base

    def _next_sampled(self) -> SampledAhead[T] | None:
        """The minibatches of the next superbatch, sampled as far as they are; None without scratch."""
        if self._ahead is not None:
            self._sampled, self._ahead = self._ahead, None
        else:
            try:
                self._sampled = self._sample_ahead(self._held)
                if self._sampled is not None:
                    self._held = []
            except OSError as error:
                self._give_up(error)
                self._sampled = None
        self._tried_next = False
        return self._sampled

    def _sample_ahead(self, first: Iterable[T]) -> SampledAhead[T] | None:
        packs, profile, observers = self._packs, self._profile, self._observers
        before = self._sampled
        if packs.scratch is None:
            self._only_random = True
            packs.learned.read_at_random("there is no scratch")
            return None

        def stage() -> AbstractContextManager[object]:
            both = ExitStack()
            both.enter_context(profile("sample"))
            both.enter_context(observers.stage("sample"))
            return both

        sampled = SampledAhead(
            self._source,
            self._ids_of,
            self._bytes_of,
            packs.tables,
            packs.scratch,
            first=first,
            spaces=self._spaces if before is None else before.spaces,  # resident rows stay
            most_bytes=packs.scratch.limit_bytes // _SPOOL_SHARE,
            count_pages=packs.options.reads == "auto",
            stage=stage,
            spooling=packs.spooling,
            seconds=self._seconds,
            base=self._base if before is None else before.base + len(before.spool),
            settle=packs.settle if packs.on_device else None,
        )
        if self._size:
            sampled.most = self._size
        self._opened.append(sampled)
        return sampled

    def _start_sampling(self, sampled: SampledAhead[T]) -> None:
        """Sample the first minibatches of the epoch; choose the size of a superbatch, or random reads."""
        before = self._seconds["sample"]
        sampled.sample(EARLY)
        if not len(sampled.spool):
            return
        wanted, together = sampled.most, self._host.together
        if not sampled.full:
            try:
                size, left = sampled.most, self._left(sampled)
                if together.overlap:
                    sample_s = self._seconds["sample"] - before
                    size = self._packs.superbatch_size(sampled, self._host, left, sample_s)
                overlap = together.overlap and (left is None or size <= left)
                early = self._packs.choose_early(sampled, self._host, left, overlap)
                wanted = 0 if early else min(wanted, size)
            except OSError as error:
                self._give_up(error)
                wanted = 0
        agreed = together.agree(wanted, sampled.room)
        if not agreed:
            if not wanted:
                self._only_random = True
            elif self._count is not None:
                self._packs.learned.read_at_random("another process reads by random reads", self._count)
            self._random(0)
            return
        self._size = sampled.most = min(sampled.most, agreed)

    def _make(self, layout: Layout, first_pack: int, *, fill_resident: bool) -> Superbatch | None:
        """A superbatch whose sweep has started; None if scratch or a file does not allow it."""
        packs, sampled = self._packs, self._ahead if self._superbatch is not None else self._sampled
        assert packs.machine is not None
        assert packs.scratch is not None
        assert sampled is not None
        sampled.forget_counts()
        begun, superbatch = time.perf_counter(), None
        try:
            superbatch = Superbatch(
                packs.machine,
                sampled.spool,
                layout,
                first_pack,
                packs.scratch,
                room_bytes=packs.room_bytes(sampled),
                fill_resident=fill_resident,
            )
            self._opened.append(superbatch)
            packs.counters["seconds"]["cut"] += time.perf_counter() - begun
            superbatch.prepare()
        except OSError as error:
            if superbatch is not None:
                self._drop(superbatch)
            self._give_up(error)
            return None
        return superbatch

    def _train(self, superbatch: Superbatch) -> bool:
        """Train a superbatch, once it is swept. Samples the next one meanwhile."""
        packs, sampled = self._packs, self._sampled
        assert sampled is not None
        if not superbatch.begun:
            try:
                if not sampled.last and self._ahead is None:
                    self._ahead = self._sample_ahead(sampled.left)
                while self._ahead is not None and not self._ahead.full and not superbatch.ready:
                    self._ahead.sample(1)
                begun = time.perf_counter()
                with self._profile("sweep"):
                    self._host.together.wait_for(lambda: superbatch.ready)
                    packs.counters["seconds"]["sweep"] += time.perf_counter() - begun
                    superbatch.begin()
            except OSError as error:
                self._drop(superbatch)
                self._give_up(error)
                return self._random(superbatch.first)
        self._superbatch = superbatch
        self._choice = choice = packs.choices[-1]
        choice["superbatches"] += 1
        choice["packs"] += superbatch.pack_count
        choice["resident_rows"] = superbatch.resident_rows
        packs.counters["superbatches"] += 1
        packs.counters["packs"] += superbatch.pack_count
        return True

    def _work_ahead(self, superbatch: Superbatch) -> None:
        """Prepare the next superbatch a little: sample, then sweep, then read its first pack."""
        sampled, packs = self._sampled, self._packs
        assert sampled is not None
        if sampled.last or self._only_random or superbatch.last_pack < len(superbatch.layout.packs):
            return
        if self._ahead is None:
            self._ahead = self._sample_ahead(sampled.left)
        ahead = self._ahead
        if ahead is None:
            return
        if not ahead.full:
            left = superbatch.end - superbatch.next  # sampled when half of them are trained
            ahead.sample(-(-2 * (ahead.most - len(ahead.spool)) // max(1, left)))
        elif self._next is None and not self._tried_next and len(ahead.spool):
            self._tried_next = True
            layout = packs.choose_again(ahead, superbatch.layout.resident)
            if layout is not None:
                self._next = self._make(layout, 0, fill_resident=False)
        coming = self._next
        if coming is not None and not coming.begun and superbatch.in_last_pack and coming.ready:
            try:
                coming.begin(1 - superbatch.last_half)
            except OSError as error:
                self._drop(coming)
                self._next = None
                self._give_up(error)

    def _finish_superbatch(self) -> Superbatch:
        superbatch, self._superbatch = self._superbatch, None
        assert superbatch is not None
        self._drop(superbatch)
        return superbatch

    def _drop(self, superbatch: Superbatch) -> None:
        superbatch.close()
        self._opened.remove(superbatch)
        counters = self._packs.counters
        counters["bytes_read"] += superbatch.bytes_read
        counters["bytes_written"] += superbatch.bytes_written
        for name, seconds in superbatch.seconds.items():
            counters["seconds"][name] += seconds

    def _end_of_sampled(self) -> None:
        """All minibatches in the spool were returned: what comes after them."""
        sampled, self._sampled = self._sampled, None
        assert sampled is not None
        counters = self._packs.counters
        counters["bytes_read"] += sampled.spool.bytes_read
        counters["bytes_written"] += sampled.spool.bytes_written
        sampled.close()
        self._opened.remove(sampled)
        self._end, sampled.end = (
            sampled.end,
            None,
        )  # its frames refer to this stream
        if sampled.reason:
            self._give_up(sampled.reason)
        if self._only_random and self._end is None:
            self._go_on(*self._after(sampled))

    def _random(self, first: int) -> bool:
        """Go on by random reads to the end: what is in the spool from `first` on, then the rest."""
        if self._sampled is None:
            held, self._held = self._held, []
            self._go_on(held, None)
        else:
            after, end = self._after(self._sampled)
            self._go_on(itertools.chain(self._sampled.spooled(first), after), end)
        return True

    def _after(self, sampled: SampledAhead[T]) -> tuple[Iterable[T], BaseException | None]:
        """What was sampled and comes after the spool, and why the source has no more, or None."""
        if self._ahead is not None:
            return self._ahead.rest(), self._ahead.end
        return sampled.left, sampled.end

    def _go_on(self, minibatches: Iterable[T], end: BaseException | None) -> None:
        self._packs.release()
        minibatches = self._packs.settled(minibatches)
        if self._packs.choices:
            self._choice = self._packs.random_choice(len(self._sampled.spool) if self._sampled else 0)
        # A generator over what it needs: an open window must not hold this stream alive.
        self._begin_window(_then(minibatches, self._source, end))

    def _begin_window(self, minibatches: Iterator[T]) -> None:
        self._window = self._host.window(minibatches)
        self._limit_window()
        self._opened.append(self._window)


def _then(first: Iterable[T], source: Iterator[T], end: BaseException | None) -> Iterator[T]:
    yield from first
    if end is None:
        yield from source
    elif not isinstance(end, StopIteration):
        raise end


def _close(pid: int, opened: list[Any], on_close: Callable[[], None]) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither the threads nor the memory
    if threading.current_thread().name.startswith("gids-"):
        # The garbage collector runs in one of the threads that this waits for.
        threading.Thread(target=_close_all, args=(opened, on_close), name="close gids").start()
    else:
        _close_all(opened, on_close)


def _close_all(opened: list[Any], on_close: Callable[[], None]) -> None:
    with ExitStack() as stack:
        stack.callback(on_close)
        for part in opened:
            stack.callback(part.close)
    opened.clear()
