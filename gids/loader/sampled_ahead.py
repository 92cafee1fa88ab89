"""SampledAhead: minibatches that are sampled into a spool, and what they read. One superbatch.

Made by PackedStream, which samples the next one while the present one is trained. Knows no packs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np

from gids import _core
from gids.errors import StorageError
from gids.loader.minibatch_sizes import rows_read
from gids.loader.stream import Ids, IdsOf
from gids.packs import NotSpoolable, OtherIdsError, Rows, Scratch, Space, Spool, rows_of, spaces_of
from gids.store import Table

T = TypeVar("T")

MOST_MINIBATCHES = 4096

_WORTH = 2.0
"""A minibatch is sampled again, to spare the disk, if that takes at most so many times as long."""


class SampledAhead(Generic[T]):
    """Minibatches of one superbatch. spaces: of the one before, or empty.

    Attributes: spool; spaces, and counts of each; pages: counts of each table's pages, if asked for; rows:
    the most that a minibatch reads of each table; minibatch_bytes: memory of the largest minibatch; largest:
    ids of the minibatch that reads the most bytes; wanted_bytes: sum of each minibatch's distinct rows. most:
    minibatches that it shall have. held: a minibatch that does not go into the spool, and after it none does;
    reason: why. end: why the source has no more, or None.

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
        self._sample_s = 0.0
        self.spool = Spool(scratch, 0, self._from)
        self.spaces = spaces
        self.counts: list[_core.Counts] = []
        self.pages: dict[str, _core.Counts] = {}
        self.rows: dict[str, int] = {}
        self.largest: Ids = {}
        self.minibatch_bytes = self.wanted_bytes = self._largest_bytes = 0
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
    def last(self) -> bool:
        """Whether there is nothing to sample after these minibatches."""
        return self.end is not None or bool(self.reason)

    def sample(self, count: int = MOST_MINIBATCHES) -> None:
        """Sample more minibatches: so many, or fewer until this is full. Errors go to `end`."""
        goal = len(self.spool) + count
        while not self.full and len(self.spool) < goal:
            begun = time.perf_counter()
            try:
                with self._stage():
                    minibatch = self._first.pop() if self._first else next(self._source)
                    ids = self._ids_of(minibatch)
                    if not self.spaces:
                        self.spaces = spaces_of(self._tables, ids)
                        self._prepare()
                    rows = rows_of(ids, self.spaces)
            except StopIteration:
                self.end = StopIteration()
                return
            except OtherIdsError as error:
                self.held, self.reason = [minibatch], str(error)
                return
            except Exception as error:
                self.end = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                return
            finally:
                self._sampled_since(begun)
            minibatch_bytes = self._bytes_of(minibatch)
            try:
                with self._spooling():
                    self.spool.put(minibatch, rows, tuple(ids), keep=self._keeps(minibatch_bytes))
            except NotSpoolable as error:
                self.held, self.reason = [minibatch], str(error)
                return
            except StorageError as error:  # scratch is full: the next superbatch begins with this one
                self.held = [minibatch]
                self.reason = "" if len(self.spool) else str(error)
                return
            self.minibatch_bytes = max(self.minibatch_bytes, minibatch_bytes)
            self._note(ids, rows)

    def rest(self, index: int) -> Iterator[T]:
        """The minibatches from index on, with those that are not in the spool."""
        yield from self.spool.rest(index)
        yield from self.held
        yield from self._first

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
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
        mean_s = self._sample_s / (1 + len(self.spool))
        return self._again is None or _WORTH * minibatch_bytes * self._keep_s < mean_s

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

    def _note(self, ids: Mapping[str, Any], rows: Sequence[Rows]) -> None:
        """Count the rows and pages of a minibatch, and how large the largest one is."""
        for counts, space, of_space in zip(self.counts, self.spaces, rows, strict=True):
            self.wanted_bytes += counts.add(of_space) * space.row_bytes
            for t in space.tables:
                if t.name in self.pages:
                    self.pages[t.name].add(of_space // np.uint32(t.rows_per_page))
        read = rows_read(ids, [t.name for t in self._tables])
        self.rows = {name: max(n, self.rows.get(name, 0)) for name, n in read.items()}
        nbytes = sum(read[t.name] * t.row_bytes for t in self._tables)
        if not self.largest or nbytes > self._largest_bytes:
            self.largest, self._largest_bytes = ids, nbytes
