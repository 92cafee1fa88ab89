"""SampledAhead: minibatches that are sampled into a spool, and what they read. One superbatch.

Made by PackedStream, which samples the next one while the present one is trained. Knows no packs.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

import numpy as np

from gids import _core
from gids.errors import StorageError
from gids.loader.minibatch_sizes import rows_read
from gids.loader.stream import Ids, IdsOf
from gids.packs import WRITING, NotSpoolable, OtherIdsError, Rows, Scratch, Space, Spool, rows_of, spaces_of
from gids.store import Table

T = TypeVar("T")

MOST_MINIBATCHES = 4096

_WORTH = 2.0
"""A minibatch is sampled again, to spare the disk, if that takes at most so many times as long."""

_ROOM = 0.75
"""The share of the bytes for minibatches that is planned for: some are larger than the first ones."""

_TIMED = 16
"""Minibatches that are timed together. The fastest ones count: the machine may be busy with other work."""


class SampledAhead(Generic[T]):
    """Minibatches of one superbatch. spaces: of the one before, or empty.

    Attributes: spool; spaces, and counts of each; pages: counts of each table's pages, if asked for; rows:
    the most that a minibatch reads of each table; minibatch_bytes: memory of the largest minibatch; largest:
    ids of the minibatch that reads the most bytes. most: minibatches that it shall have. held: minibatches
    that were sampled and do not go into the spool, nor do those after them; reason: why. end: why the source
    has no more, or None.

    base: number of minibatches before this superbatch. again: samples the minibatches from a number on once
    more; None: it cannot. keep_s: seconds to write and read a byte of a minibatch, so that it need not be
    sampled again.
    """

    def __init__(
        self,
        source: Iterator[T],
        ids_of: IdsOf[T],
        bytes_of: Callable[[T], int],
        tables: Sequence[Table],
        scratch: Scratch,
        *,
        first: Iterable[T],
        spaces: list[Space],
        most_bytes: int,
        count_pages: bool,
        stage: Callable[[], AbstractContextManager[object]],
        spooling: Callable[[], AbstractContextManager[object]],
        seconds: dict[str, float],
        base: int,
        again: Callable[[int], Iterator[T]] | None,
        keep_s: float,
    ) -> None:
        self._source, self._ids_of, self._bytes_of = source, ids_of, bytes_of
        self._tables, self._most_bytes, self._count_pages = tables, most_bytes, count_pages
        self._stage, self._spooling, self._seconds = stage, spooling, seconds
        self._first = list(first)
        self.most = MOST_MINIBATCHES
        self.base, self._again, self._keep_s = base, again, keep_s
        self._sample_s, self._fastest_s = 0.0, math.inf
        self._pid = os.getpid()
        self._counter = ThreadPoolExecutor(1, "gids-count")
        # Minibatches that are written and counted. Those that can be sampled again are not kept meanwhile.
        self._writing: deque[tuple[T | None, Future[None], Future[None]]] = deque()
        self.spool = Spool(scratch, 0, self._from)
        self.spaces = spaces
        self.counts: list[_core.Counts] = []
        self.pages: dict[str, _core.Counts] = {}
        self.rows: dict[str, int] = {}
        self.largest: Ids = {}
        self.minibatch_bytes = self._largest_bytes = 0
        self.held: list[T] = []
        self.reason = ""
        self.end: BaseException | None = None
        if spaces:
            self._prepare()

    @property
    def full(self) -> bool:
        """Whether sample() would add nothing."""
        return (
            self.end is not None
            or bool(self.held)
            or len(self.spool) >= self.most
            or self.spool.bytes_written >= self._most_bytes
        )

    @property
    def room(self) -> int:
        """About how many minibatches like these the spool has room for."""
        if self.held:
            return len(self.spool)
        return int(_ROOM * self._most_bytes * len(self.spool) / max(1, self.spool.bytes_written))

    @property
    def last(self) -> bool:
        """Whether there is nothing to sample after these minibatches."""
        return self.end is not None or bool(self.reason)

    def sample(self, count: int = MOST_MINIBATCHES) -> None:
        """Sample more minibatches: so many, or fewer until this is full. Errors go to `end`."""
        self._sample(count)
        if self.held:
            self.held += self._first
            self._first = []

    def _sample(self, count: int) -> None:
        goal = len(self.spool) + count
        while not self.full and len(self.spool) < goal:
            begun = time.perf_counter()
            try:
                with self._stage():
                    minibatch = self._first.pop(0) if self._first else next(self._source)
                    ids = self._ids_of(minibatch)
                    if not self.spaces:
                        self.spaces = spaces_of(self._tables, ids)
                        self._prepare()
                    rows = rows_of(ids, self.spaces)
            except StopIteration:
                if self._settle():  # else the source ends again, after those that are held
                    self.end = StopIteration()
                return
            except OtherIdsError as error:
                return self._hold(minibatch, str(error))
            except Exception as error:
                self._settle()
                self.end = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                return
            finally:
                self._sampled_since(begun)
            if not self._settle(WRITING - 1):
                self.held.append(minibatch)
                return
            minibatch_bytes = self._bytes_of(minibatch)
            try:
                with self._spooling():
                    keep = self._keeps(minibatch_bytes)
                    written = self.spool.begin_put(minibatch, rows, tuple(ids), keep=keep)
            except NotSpoolable as error:
                return self._hold(minibatch, str(error))
            except StorageError as error:  # scratch is full: the next superbatch begins with this one
                return self._hold(minibatch, "" if len(self.spool) else str(error))
            self.minibatch_bytes = max(self.minibatch_bytes, minibatch_bytes)
            self._note(ids)
            held = minibatch if self._again is None else None
            self._writing.append((held, written, self._counter.submit(self._count, rows)))
        self._settle()

    def _settle(self, most: int = 0) -> bool:
        """Wait until no more than so many minibatches are being written and counted.

        False if one could not be written: then it is held, with those after it.
        """
        while len(self._writing) > most:
            _, written, counted = self._writing[0]
            try:
                written.result()
            except StorageError as error:
                futures.wait(f for _, *both in self._writing for f in both)
                self.spool.drop_from(len(self.spool) - len(self._writing))
                if self._again is None:
                    self.held = [cast(T, minibatch) for minibatch, _, _ in self._writing]
                else:
                    sample = self._from(len(self.spool))
                    self.held = [sample() for _ in self._writing]
                self.reason = "" if len(self.spool) else str(error)
                self._writing.clear()
                return False
            counted.result()
            self._writing.popleft()
        return True

    def _hold(self, minibatch: T, reason: str) -> None:
        """End before a minibatch that does not go into the spool."""
        if self._settle():
            self.reason = reason
        self.held.append(minibatch)

    def rest(self, index: int) -> Iterator[T]:
        """The minibatches from index on, with those that are not in the spool."""
        yield from self.spool.rest(index)
        yield from self.held
        yield from self._first

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        if os.getpid() == self._pid:  # a forked child has no such thread
            self._counter.shutdown(wait=True, cancel_futures=True)
        self.spool.close()

    def _prepare(self) -> None:
        self.spool.space_count = len(self.spaces)
        self.counts = [_core.Counts.create(space.row_count) for space in self.spaces]
        if self._count_pages:
            self.pages = {
                t.name: _core.Counts.create(t.page_count) for t in self._tables if t.rows_per_page > 1
            }

    def forget_counts(self) -> None:
        """Free their memory, once packs are cut."""
        self.counts, self.pages = [], {}

    def _sampled_since(self, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self._sample_s += seconds
        self._seconds["sample"] += seconds

    def _keeps(self, minibatch_bytes: int) -> bool:
        """Whether to write a minibatch takes much less time than to sample it again."""
        if self._again is None:
            return True
        count = len(self.spool)
        if count and count % _TIMED == 0:
            if count > _TIMED:  # at first the topology is read from disk
                self._fastest_s = min(self._fastest_s, self._sample_s / _TIMED)
            self._sample_s = 0.0
        known = math.isfinite(self._fastest_s)
        return known and _WORTH * minibatch_bytes * self._keep_s < self._fastest_s

    def _from(self, index: int) -> Callable[[], T]:
        """Returns a function that samples the minibatches of this superbatch from one on once more."""
        assert self._again is not None
        minibatches = self._again(self.base + index)

        def sample() -> T:
            begun = time.perf_counter()
            try:
                with self._stage():
                    return next(minibatches)
            finally:
                self._sampled_since(begun)

        return sample

    def _count(self, rows: Sequence[Rows]) -> None:
        """Count the rows and pages of a minibatch."""
        for counts, space, of_space in zip(self.counts, self.spaces, rows, strict=True):
            counts.add(of_space)
            for t in space.tables:
                if t.name in self.pages:
                    self.pages[t.name].add(of_space // np.uint32(t.rows_per_page))

    def _note(self, ids: Mapping[str, Any]) -> None:
        """Note how large the largest minibatch is."""
        read = rows_read(ids, [t.name for t in self._tables])
        self.rows = {name: max(n, self.rows.get(name, 0)) for name, n in read.items()}
        nbytes = sum(read[t.name] * t.row_bytes for t in self._tables)
        if not self.largest or nbytes > self._largest_bytes:
            self.largest, self._largest_bytes = ids, nbytes
