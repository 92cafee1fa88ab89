"""SampledAhead: minibatches that are sampled into a spool, and what they read. One superbatch.

Made by PackSwitch, which samples the next one while the present one is trained. Knows no packs.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakMethod

import numpy as np

from gids import _core
from gids.closing import Threads
from gids.errors import StorageError
from gids.loader.epoch_stream import Failed, IdsOf, Sampled, forgetting, without_frames
from gids.loader.memory import rows_read
from gids.loader.readers import Ids
from gids.packs import WRITING, NotSpoolable, Reads, Rows, Spool, rows_of
from gids.profiling import stage

if TYPE_CHECKING:
    from gids.loader.pack_reads import PackReads

T = TypeVar("T")

MOST_MINIBATCHES = 4096

_BESIDE = 8
"""Minibatches of other processes after which the time of sampling is known: some were ready at first."""

_SPOOL_SHARE = 8
"""The minibatches take at most an eighth of the scratch."""


class Background:
    """What must be closed of minibatches that are sampled ahead. Refers to no sampler, which may refer to the
    loader."""

    def __init__(self, counter: Threads, spool: Spool) -> None:
        self._counter, self._spool, self._pid = counter, spool, os.getpid()

    def close(self) -> None:
        """Idempotent."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            self._counter.shutdown(wait=True, cancel_futures=True)
        self._spool.close()


class SampledAhead(Generic[T]):
    """Minibatches of one superbatch. packs: of the loader, with scratch.

    Attributes: spool; counts: of each table's rows; pages: counts of each table's pages, if asked for; rows:
    the most that a minibatch reads of each table; minibatch_bytes: memory of the largest minibatch; largest:
    ids of the minibatch that reads the most bytes. most: minibatches that it shall have. held: minibatches
    that were sampled and do not go into the spool, nor do those after them; reason: why. end: why the source
    has no more, or None.

    base: number of minibatches before this superbatch. goes_on: after the last one of an epoch, the next
    epoch may be prepared. room_for_two: memory allows to make the next superbatch while these minibatches are
    trained. spare: as of Scratch.open().
    """

    def __init__(
        self,
        source: Sampled[T],
        ids_of: IdsOf[T],
        bytes_of: Callable[[T], int],
        packs: PackReads,
        seconds: dict[str, float],
        *,
        first: Iterable[T],
        base: int,
        goes_on: bool = False,
        spare: bool = False,
    ) -> None:
        assert packs.scratch is not None
        self._source, self._ids_of, self._bytes_of = source, ids_of, bytes_of
        self._packs, self._seconds = packs, seconds
        self._tables, self._most_bytes = packs.tables, packs.scratch.limit_bytes // _SPOOL_SHARE
        self._first = list(first)
        self._new, self._new_s = 0, 0.0  # minibatches that the source sampled, and the time of it
        self.most = MOST_MINIBATCHES
        self.base, self.room_for_two, self._goes_on = base, True, goes_on
        self._counter = Threads(1, "gids-count")
        self._writing: deque[tuple[T, Future[None], Future[None]]] = deque()  # being written and counted
        reads_of = WeakMethod(self._reads_of)
        self.spool = Spool(
            packs.scratch,
            len(packs.tables),
            lambda minibatch: cast("Callable[[T], Reads]", reads_of())(minibatch),
            on_device=packs.on_device,
            spare=spare,
            counters=packs.counters,
        )
        self.background = Background(self._counter, self.spool)
        self.counts = [_core.Counts.create(t.row_count) for t in self._tables]
        self.pages: dict[str, _core.Counts] = {}
        if packs.options.reads == "auto":
            pages = [t for t in self._tables if t.rows_per_page > 1]
            self.pages = {t.name: _core.Counts.create(t.page_count) for t in pages}
        self.rows: dict[str, int] = {}
        self.largest: Ids = {}
        self.minibatch_bytes = self._largest_bytes = 0
        self.held: list[T] = []
        self.reason = ""
        self.end: BaseException | None = None

    @property
    def full(self) -> bool:
        """Whether sample() would add nothing."""
        return (
            self.end is not None
            or bool(self.held)
            or len(self.spool) >= self.most
            or (len(self.spool) > 0 and self.spool.bytes_written >= self._most_bytes)
        )

    @property
    def counts_bytes(self) -> int:
        """Memory of all counts."""
        return sum(counts.nbytes for counts in (*self.counts, *self.pages.values()))

    @property
    def last(self) -> bool:
        """Whether the epoch has nothing to sample after these minibatches."""
        return self.end is not None or bool(self.reason)

    @property
    def overlap(self) -> bool:
        """Whether the next superbatch, perhaps of the next epoch, is made while these are trained."""
        whole = isinstance(self.end, StopIteration) and not self.reason
        return self.room_for_two and (not self.last or (self._goes_on and whole))

    def sample(self, count: int = MOST_MINIBATCHES) -> None:
        """Sample more minibatches: so many, or fewer until this is full. They are written and counted then.
        Errors go to `end`."""
        goal = len(self.spool) + count
        while not self.full and len(self.spool) < goal:
            begun = time.perf_counter()
            try:
                with stage("sample"):
                    minibatch = self._first.pop(0) if self._first else self._sampled_now()
                    try:
                        ids = self._ids_of(minibatch)
                    except StorageError as error:
                        minibatch, ids = Failed.of(error), {}
                    reads = Reads(rows_of(ids, self._tables), tuple(ids))
            except StopIteration:
                if self.settle():  # else the source ends again, after those that are held
                    self.end = StopIteration()
                return
            except Exception as error:
                if self.settle():
                    self.end = without_frames(error)
                else:  # it fails again, after those that could not be written
                    self.held.append(minibatch)
                return
            finally:
                self._seconds["sample"] += time.perf_counter() - begun
            if not self.settle(WRITING - 1):
                self.held.append(minibatch)
                return
            minibatch_bytes = self._bytes_of(minibatch)
            try:
                with self._packs.spooling():
                    written = self.spool.begin_put(minibatch, reads)
            except NotSpoolable as error:
                return self._hold(minibatch, str(error))
            except OSError as error:  # of scratch, or memory: the next superbatch begins with this one
                return self._hold(minibatch, "" if len(self.spool) else str(error))
            self.minibatch_bytes = max(self.minibatch_bytes, minibatch_bytes)
            self._note(ids)
            self._writing.append((minibatch, written, self._counter.submit(self._count, reads.rows)))
        self.settle()

    def _sampled_now(self) -> T:
        begun = time.perf_counter()
        minibatch = next(self._source)
        self._new, self._new_s = self._new + 1, self._new_s + time.perf_counter() - begun
        return minibatch

    @property
    def beside_s(self) -> float | None:
        """Seconds in which other processes sample a minibatch. 0: none do. None: it is not known yet."""
        if not self._source.beside:
            return 0.0
        return self.each_s if self._new >= _BESIDE else None

    @property
    def each_s(self) -> float:
        """Seconds in which the source sampled a minibatch."""
        return self._new_s / max(1, self._new)

    def settle(self, most: int = 0) -> bool:
        """Wait until no more than so many minibatches are being written and counted.

        False if one could not be written: then it is held, with those after it.
        """
        while len(self._writing) > most:
            _, written, counted = self._writing[0]
            error = written.exception()  # not raised: frames that refer to packs would stay with it
            if isinstance(error, StorageError):
                futures.wait(f for _, *both in self._writing for f in both)
                self.spool.drop_from(len(self.spool) - len(self._writing))
                self.held = [minibatch for minibatch, _, _ in self._writing]
                self.reason = "" if len(self.spool) else str(error)
                self._writing.clear()
                return False
            written.result()
            counted.result()
            self._writing.popleft()
        return True

    def _hold(self, minibatch: T, reason: str) -> None:
        """End before a minibatch that does not go into the spool."""
        if self.settle():
            self.reason = reason
        self.held.append(minibatch)

    def spooled(self, first: int) -> Iterator[T]:
        """The minibatches in the spool from `first` on. One that cannot be read is Failed."""
        for i in range(first, len(self.spool)):
            try:
                minibatch: T = self.spool.take(i)[0]
            except StorageError as error:
                minibatch = Failed.of(error)
            self._packs.settle()
            yield minibatch
            del minibatch

    def rest(self, first: int = 0) -> Iterator[T]:
        """The minibatches from `first` on, to the end of the source. No other one comes into the spool."""
        self.forget_counts()
        return self._rest(first)

    def _rest(self, first: int) -> Iterator[T]:
        yield from self.spooled(first)
        if self.end is None:
            yield from forgetting(self.held, self._first)
            for minibatch in self._source:  # "yield from" would close it with this generator
                yield minibatch
                del minibatch
        elif not isinstance(self.end, StopIteration):
            raise self.end

    @property
    def left(self) -> list[T]:
        """The minibatches that were sampled and are not in the spool."""
        return self.held + self._first

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        self.background.close()

    def forget_counts(self) -> None:
        """Free their memory, once packs are cut."""
        self.settle()
        self.counts, self.pages = [], {}

    def _reads_of(self, minibatch: T) -> Reads:
        """What a minibatch that comes from the spool reads."""
        self._packs.settle()
        ids = self._ids_of(minibatch)
        return Reads(rows_of(ids, self._tables), tuple(ids))

    def _count(self, rows: Sequence[Rows]) -> None:
        """Count the rows and pages of a minibatch."""
        for t, counts, of_table in zip(self._tables, self.counts, rows, strict=True):
            counts.add(of_table)
            if t.name in self.pages:
                self.pages[t.name].add(of_table // np.uint32(t.rows_per_page))

    def _note(self, ids: Mapping[str, Any]) -> None:
        """Note how large the largest minibatch is."""
        read = rows_read(ids, [t.name for t in self._tables])
        self.rows = {name: max(n, self.rows.get(name, 0)) for name, n in read.items()}
        nbytes = sum(read[t.name] * t.row_bytes for t in self._tables)
        if not self.largest or nbytes > self._largest_bytes:
            self.largest, self._largest_bytes = ids, nbytes
