"""Superbatch: minibatches of an epoch that are read by packs together. Ahead: an epoch's minibatches, some of
them sampled ahead. Packs: what the epochs of a FeatureLoader share.

Called by the Packer, which decides.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from gids import _core
from gids.errors import MemoryBudgetError
from gids.loader.queue import without_frames
from gids.loader.stats import PACK_COUNTERS, PACK_SECONDS
from gids.packs.annex import Annex, RowUses
from gids.packs.annex import Superbatch as Planned
from gids.packs.predict import measure_rates, predict
from gids.packs.scratch import Scratch
from gids.packs.spool import Spool
from gids.store import Table

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.loader.options import Options
    from gids.packs.device_runs import OnDevice

T = TypeVar("T")
log = logging.getLogger("gids")

_WORK_SHARE = 16
"""Beside another superbatch, a sweep takes a sixteenth of the memory; else half."""

_MARGIN = 1.25
"""A superbatch may have so many times the copies that the last one tells."""


@dataclass
class Choice:
    """How the minibatches of a superbatch are read. stats()["packs"]["choices"] has the fields.

    way: "random" or "pack". predicted_s: seconds by way. returned: minibatches that came so far.
    actual_s: what the consumer waited for them, and for the pass before them.
    """

    way: str
    minibatches: int
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    returned: int = 0
    actual_s: float = 0.0


class Ahead(Generic[T], Iterator[T]):
    """The minibatches of an epoch. Some are sampled before they are asked for, and wait in spools.

    minibatches: what the epoch samples from. settle: called when one comes from a spool. Attributes: end:
    what comes after the sampled ones; None before it is met.
    """

    def __init__(self, minibatches: Iterable[T], settle: Callable[[], None] = lambda: None) -> None:
        self.minibatches, self._settle = minibatches, settle
        self.end: Exception | None = None
        self._source = iter(minibatches)
        self._spools: deque[Spool] = deque()
        self._held: deque[T] = deque()  # after those in the spools

    @property
    def can_sample(self) -> bool:
        """Whether more minibatches may be sampled ahead."""
        return self.end is None and not self._held

    def __next__(self) -> T:
        while self._spools:
            if len(self._spools[0]):
                minibatch: T = self._spools[0].take()
                self._settle()
                return minibatch
            if len(self._spools) == 1 and self.can_sample:
                break  # more may come into it
            self._spools.popleft().close()
        if self._held:
            return self._held.popleft()
        for minibatch in self.sample():
            return minibatch
        assert self.end is not None
        raise self.end

    def sample(self) -> list[T]:
        """The next minibatch of the source, which the caller spools or holds; [] at its end, or after its
        error, which is raised in its place."""
        if self.end is None:
            try:
                return [next(self._source)]
            except StopIteration:
                self.end = StopIteration()
            except Exception as error:
                self.end = without_frames(error)
            self._source = iter(())
        return []

    def spool(self, spool: Spool) -> None:
        """The next minibatches that are sampled ahead go there."""
        self._spools.append(spool)

    def hold(self, minibatch: T) -> None:
        """Keep one in memory that goes into no spool. None is sampled ahead until it was asked for."""
        self._held.append(minibatch)

    def close(self) -> None:
        """Drop what was sampled: there are no more minibatches, which is an error. Idempotent."""
        while self._spools:
            self._spools.popleft().close()
        self._held.clear()
        self._source, self.end = iter(()), ValueError("this loader is closed: make a new one")


@dataclass(eq=False)
class Superbatch:
    """Minibatches that are read by packs together: those of an epoch from `first` on.

    uses, planned: by table. lines: of each table. purposes: the memory to read it, bytes by purpose.
    work_bytes: the memory to sweep it. beside: whether memory is enough to prepare another one while it is
    read. swept: whether it may be read, once it is; None while it is sampled. bad: whether its scratch could
    not be read.
    """

    ahead: Ahead[Any]
    first: int
    spool: Spool
    uses: list[RowUses]
    minibatch_bytes: int = 0  # memory of the largest minibatch
    planned: list[Planned] = field(default_factory=list)
    lines: Sequence[int] = ()
    purposes: Mapping[str, int] = field(default_factory=dict)
    work_bytes: int = 0
    beside: bool = False
    choice: Choice = field(default_factory=lambda: Choice("random", 0))
    swept: Future[bool] | None = None
    bad: bool = False
    cancel: _core.Cancel = field(default_factory=_core.Cancel.create)

    def __len__(self) -> int:
        return len(self.uses[0])

    @property
    def end(self) -> int:
        return self.first + len(self)


@dataclass(eq=False)
class Counted:
    """What a FeatureLoader counted of packs. swept_bytes: the part of "bytes_read" that its engine counts."""

    counters: Counter[str] = field(default_factory=lambda: Counter(PACK_COUNTERS))
    seconds: dict[str, float] = field(default_factory=lambda: dict(PACK_SECONDS))
    choices: list[Choice] = field(default_factory=list)
    swept_bytes: int = 0


class Reading(Protocol):
    """A superbatch that is read: gids.loader.annex_rows.AnnexRows."""

    def memory(self) -> dict[str, int]: ...
    def count(self, counters: Counter[str], seconds: dict[str, float]) -> None: ...


class Packs:
    """What the epochs of a FeatureLoader share: scratch, annexes, what was measured, counters.

    memory_bytes: of the loader, on the host. sampled_s: gets the seconds that sampling takes, as
    "sample". on_device: where rows are; None: on the host. pinned: in pinned memory.

    Attributes: random_s: seconds that a minibatch waits for random reads, 0 if it is not known.
    random_below: epochs of at most so many minibatches do not consider packs. copied_share: of the rows that
    the last superbatch used, those that were copied; 0 before. coming: what is prepared of a next epoch, or
    None. reading: the superbatch that is read, or None.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        options: Options,
        dtype: torch.dtype | None,
        engine: Engine,
        scratch: Scratch,
        memory_bytes: int,
        sampled_s: dict[str, float],
        on_device: OnDevice | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        self.sampled_s, self.on_device, self.pinned = sampled_s, on_device, pinned
        self.tables, self.options, self.dtype, self.engine = tables, options, dtype, engine
        self.scratch, self.memory_bytes = scratch, memory_bytes
        self.annexes = [Annex(t, scratch) for t in tables]
        self.threads = options.threads or torch.get_num_threads()
        self.workers = _core.Workers.create(self.threads)
        self.thread, self._pid = ThreadPoolExecutor(1, "gids-packs"), os.getpid()
        self.counted = Counted()
        self.random_s, self.random_below, self.copied_share = 0.0, 0.0, 0.0
        self.coming: Superbatch | None = None
        self.reading: Reading | None = None

    def preparing_bytes(self, superbatch: Superbatch) -> int:
        """Memory to plan and to sweep it beside another one, about: one table after the other."""
        least = max(
            a.preparing_bytes(uses, self.threads)
            for a, uses in zip(self.annexes, superbatch.uses, strict=True)
        )
        return max(least, self.memory_bytes // _WORK_SHARE)

    def copied_bytes(self, superbatch: Superbatch) -> float:
        """Scratch that the copies of a superbatch may take, as far as the last one tells."""
        return _MARGIN * self.copied_share * self._used_bytes(superbatch)

    def _used_bytes(self, superbatch: Superbatch) -> int:
        strides = (_core.annex_row_bytes(t.row_bytes) for t in self.tables)
        return sum(s * uses.native.uses for s, uses in zip(strides, superbatch.uses, strict=True))

    def has_scratch(self, superbatch: Superbatch) -> bool:
        """Whether there is scratch for the copies, beside what is read."""
        free = self.scratch.free_bytes + sum(annex.free_bytes for annex in self.annexes)
        return self.copied_bytes(superbatch) <= free

    def begin(self, superbatch: Superbatch) -> None:
        """Begin to prepare a superbatch that was sampled, in a thread."""
        in_pause, beside = self.memory_bytes // 2, self.preparing_bytes(superbatch)
        superbatch.work_bytes = in_pause if self.reading is None else beside
        superbatch.swept = self.thread.submit(self.prepare, superbatch)

    def prepare(self, superbatch: Superbatch) -> bool:
        """Plan it, and write its copies if that is faster, or asked for. Returns whether it is read by packs.
        Blocks. Raises OSError."""
        begun, first_file = time.perf_counter(), 0
        counted, choice = self.counted, superbatch.choice
        for t, annex, uses, lines in self._parts(superbatch, superbatch.uses, superbatch.lines):
            planned = annex.plan(
                uses,
                lines=lines,
                work_bytes=superbatch.work_bytes,
                workers=self.workers,
                first_file=first_file,
                cancel=superbatch.cancel,
            )
            superbatch.planned.append(planned)
            first_file += len(t.shard_paths)
        copied = sum(planned.plan.nbytes for planned in superbatch.planned)
        self.copied_share = copied / max(1, self._used_bytes(superbatch))
        planned_at = time.perf_counter()
        counted.seconds["plan"] += planned_at - begun
        choice.minibatches = len(superbatch)
        if self.options.reads == "auto":
            choice.predicted_s = self._predict(superbatch)
            if choice.predicted_s["random"] <= choice.predicted_s["pack"]:
                return False
        choice.way = "pack"
        for t, annex, planned in self._parts(superbatch, superbatch.planned):
            crcs = t.checksums() if self.options.check_crc else None
            swept = annex.sweep(
                planned, self.engine, workers=self.workers, checksums=crcs, cancel=superbatch.cancel
            )
            counted.swept_bytes += int(swept["bytes_read"])
            counted.counters["bytes_read"] += int(swept["bytes_read"])
            counted.counters["bytes_written"] += int(swept["bytes_written"])
        counted.counters["superbatches"] += 1
        counted.seconds["sweep"] += time.perf_counter() - planned_at
        return True

    def _parts(self, superbatch: Superbatch, *by_table: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """(table, annex, *of the table) of each table that the superbatch reads."""
        for i, (t, annex) in enumerate(zip(self.tables, self.annexes, strict=True)):
            yield t, annex, *(values[i] for values in by_table)

    def _predict(self, superbatch: Superbatch) -> Mapping[str, float]:
        rates = measure_rates(
            [shard for t in self.tables for shard in t.shards],
            self.scratch,
            direct=self.options.direct,
            engine=self.options.engine,
            memory_bytes=self.memory_bytes,
        )
        plans = [planned.plan for planned in superbatch.planned]
        sweeps = (
            min(t.page_count, plan.copies) * t.page_bytes for t, plan in zip(self.tables, plans, strict=True)
        )
        return predict(
            rates,
            random_s=self.random_s * len(superbatch),
            swept_bytes=sum(sweeps),
            copied_bytes=sum(plan.nbytes for plan in plans),
            uses=sum(uses.native.uses for uses in superbatch.uses),
        )

    def release(self, superbatch: Superbatch) -> None:
        """End preparing it; its scratch, but for the spool, may be used again. Idempotent."""
        superbatch.cancel.cancel()
        if superbatch.swept is not None and os.getpid() == self._pid:  # a forked child has no such thread
            futures.wait([superbatch.swept])
        for annex, planned in zip(self.annexes, superbatch.planned, strict=False):
            annex.release(planned, bad=superbatch.bad)
        for uses in superbatch.uses:
            uses.close()

    def give_up(self, reason: object) -> None:
        """Read at random from now on. That memory is too small for packs is no warning if they were not asked
        for."""
        if self.random_below < math.inf:
            self.random_below = math.inf
            chosen = isinstance(reason, MemoryBudgetError) and self.options.reads == "auto"
            level = logging.INFO if chosen else logging.WARNING
            log.log(level, "rows are read at random from now on, not by packs: %s", str(reason))

    def keep(self, coming: Superbatch | None) -> None:
        """Keep what is prepared of a next epoch, in place of what is kept."""
        before, self.coming = self.coming, coming
        if before is not None:
            self.release(before)
            before.ahead.close()

    def new_ahead(self, minibatches: Iterable[T]) -> Ahead[T]:
        """The minibatches of an epoch of which nothing is prepared."""
        return Ahead(minibatches) if self.on_device is None else Ahead(minibatches, self.on_device.settle)

    def ahead(self, minibatches: Iterable[T]) -> tuple[Ahead[T], Superbatch | None]:
        """The minibatches of an epoch that begins, and what is prepared of them."""
        coming = self.coming
        if coming is None or coming.ahead.minibatches is not minibatches:
            return self.new_ahead(minibatches), None
        self.coming = None
        return coming.ahead, coming

    def close(self) -> None:
        """Give all scratch back. Idempotent. No superbatch may be read."""
        self.keep(None)
        self.thread.shutdown()
        for annex in self.annexes:
            annex.close()

    def stats(self) -> dict[str, Any]:
        """Counters, and each superbatch's choice."""
        counters, seconds = self.counted.counters.copy(), dict(self.counted.seconds)
        if self.reading is not None:
            self.reading.count(counters, seconds)
        return {
            **counters,
            "seconds": seconds,
            "choices": [dict(vars(choice)) for choice in self.counted.choices],
            "scratch": [str(directory) for directory in self.scratch.directories],
        }
