"""PackedStream: returns sampled minibatches with their features, read by packs where that is faster.

Made by FeatureLoader.attach in place of a WindowedStream. It samples a superbatch ahead, chooses how to read
it by cost, and goes on by random reads (a WindowedStream) where packs do not pay or do not work.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from gids import _core
from gids.cache.output_dtype import out_row_bytes
from gids.closing import Closing
from gids.errors import MemoryBudgetError, StorageError
from gids.loader.minibatch_sizes import rows_read
from gids.loader.observer import Observers
from gids.loader.options import Options
from gids.loader.stages import Stage
from gids.loader.stream import Features, Ids, IdsOf
from gids.packs import (
    DiskRates,
    Layout,
    NotSpoolable,
    OtherIdsError,
    PackBudget,
    PackMachine,
    PackPlan,
    Scratch,
    Space,
    Spool,
    Superbatch,
    choose_layout,
    find_scratch,
    measure_rates,
    rows_of,
    spaces_of,
)
from gids.sizes import format_bytes
from gids.store import Table

T = TypeVar("T")
log = logging.getLogger("gids")

LEAST_BYTES = 256 << 20
"""Smaller tables are always read by random reads, unless packs are asked for."""

_SPOOL_SHARE = 4
"""Sampled minibatches take at most a quarter of the scratch."""

_LOOKAHEAD_GAIN = 0.9
"""Misses of the look-ahead cache, relative to a cache that keeps the most wanted pages."""

_WORTH_S = 1.0
"""Packs must save this many seconds of a superbatch."""

_WORTH = 0.9
"""Packs must take at most this share of the time of random reads."""

_MOST_MINIBATCHES = 4096
"""Of a superbatch."""


@dataclass(frozen=True)
class PackHost:
    """What a PackedStream asks of its FeatureLoader.

    sampler_bytes: memory of the sampler. window: a stream that reads minibatches by random reads. lines_for:
    the lines that the cache would have for minibatches like this one, by table; None if they do not fit.
    take_memory: free the cache, borrow the memory of other loaders; returns the bytes that packs may take.
    """

    sampler_bytes: Callable[[], int]
    window: Callable[[Iterable[Any]], Any]
    lines_for: Callable[[Ids, int], Mapping[str, int] | None]
    take_memory: Callable[[], int]


@dataclass
class PackReads:
    """What FeatureLoader keeps for its packed streams: options, measured rates, counters.

    dtype: of the features, or None for the stored one. bounce_bytes: memory of the loader's engine.
    consumer_s: seconds of the consumer per minibatch, measured; 0 at first.
    """

    tables: Sequence[Table]
    options: Options
    dtype: torch.dtype | None
    bounce_bytes: int
    machine: PackMachine | None = None
    consumer_s: float = 0.0
    step: int = 0
    counters: dict[str, Any] = field(default_factory=dict)
    chosen: list[dict[str, Any]] = field(default_factory=list)
    only_random: str = ""
    """Why later epochs do not consider packs; empty if they do."""

    def __post_init__(self) -> None:
        self._scratch: Scratch | None = None
        self._looked = False
        self.purposes: Mapping[str, int] = {}
        self.counters = {
            "superbatches": 0,
            "packs": 0,
            "minibatches": 0,
            "bytes_read": 0,
            "bytes_written": 0,
            "seconds": {"cut": 0.0, "sweep": 0.0, "wait": 0.0, "gather": 0.0},
        }

    @property
    def scratch(self) -> Scratch | None:
        """Where packs go; looked for once."""
        if not self._looked:
            shards = [path for t in self.tables for path in t.shard_paths]
            self._scratch = find_scratch(self.options.scratch, self.options.scratch_bytes, shards)
            self._looked = True
        return self._scratch

    def rates(self) -> DiskRates:
        """Of the disk, for pages of the table with most bytes."""
        table = max(self.tables, key=lambda t: t.page_count * t.page_bytes)
        return measure_rates(
            [path for t in self.tables for path in t.shard_paths],
            self.scratch,
            page_bytes=table.page_bytes,
            depth=self.options.queue_depth,
            direct=self.options.direct,
            engine=self.options.engine,
        )

    def stats(self) -> dict[str, Any]:
        """Counters, and each superbatch's choice."""
        seconds = dict(self.counters["seconds"])
        return {**self.counters, "seconds": seconds, "choices": [dict(c) for c in self.chosen]}

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; empty while packs have no memory. "outputs" is the peak."""
        if self.machine is None:
            return {}
        return {**self.purposes, "outputs": self.machine.peak_output_bytes}

    def release(self) -> None:
        """Free the memory of packs. Between epochs only."""
        self.machine = None
        self.purposes = {}


class PackedStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}), like WindowedStream.

    host: the loader. count: number of minibatches, or None if unknown. on_close: called once.
    """

    def __init__(
        self,
        minibatches: Iterable[T],
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
        self._source: Iterator[T] = iter(minibatches)
        self._ids_of, self._bytes_of, self._host, self._packs = ids_of, bytes_of, host, packs
        self._left = count
        self._seconds, self._profile, self._observers = seconds, stage, observers
        self._window: Any = None
        self._superbatch: Superbatch | None = None
        self._layout: Layout | None = None
        self._spool: Spool | None = None
        self._counts: list[Any] = []
        self._spaces: list[Space] = []
        self._held: list[T] = []  # sampled, and not in the spool
        self._end: BaseException | None = None
        self._closed = False
        self._limit: tuple[int, str] | None = None
        self._choice: dict[str, Any] = {}
        self._returned_at: float | None = None
        self._opened: list[Any] = []  # what closing needs must not hold the stream itself alive
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._opened, on_close)

    def __next__(self) -> tuple[T, Features]:
        """The next minibatch. The stream goes on after a StorageError and ends with any other error."""
        if self._closed:
            raise StopIteration
        begun = time.perf_counter()
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

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window of random reads from now on."""
        self._limit = (batches, reason)
        if self._window is not None:
            self._window.limit_window(batches, reason)

    def close(self) -> None:
        """End what runs in the background, drop what was sampled ahead. Idempotent."""
        self._closed = True
        self._held.clear()
        self._end = self._window = self._superbatch = self._spool = None
        self._finalizer()
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _take(self) -> tuple[T, Features]:
        while self._window is None:
            superbatch = self._superbatch
            if superbatch is not None and superbatch.next < superbatch.end:
                return self._from(superbatch)
            if not self._advance():
                raise self._take_end()
        taken: tuple[T, Features] = next(self._window)
        return taken

    def _from(self, superbatch: Superbatch) -> tuple[T, Features]:
        packs, observers, begun = self._packs, self._observers, time.perf_counter()
        with self._profile("gather"), observers.stage("gather"):
            minibatch, features, error = superbatch.take()
        if observers.any:
            observers.entered(packs.step, self._ids_of(minibatch))
            for event in (observers.planned, observers.gathered, observers.retired):
                event(packs.step)
        packs.step += 1
        packs.counters["minibatches"] += 1
        self._choice["actual_s"] += time.perf_counter() - begun
        if error is not None:
            raise error
        return minibatch, features

    def _consumed(self, seconds: float) -> None:
        """Keep a moving average of the consumer's seconds per minibatch."""
        before = self._packs.consumer_s
        self._packs.consumer_s = seconds if not before else 0.9 * before + 0.1 * seconds

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None
        return end or StopIteration()

    # --- one superbatch after the other ---

    def _advance(self) -> bool:
        """Prepare a superbatch, or a window. False at the end of the minibatches."""
        if self._superbatch is not None:
            done, layout = self._finish_superbatch(), self._layout
            assert layout is not None
            if done < len(layout.candidate.packs):
                return self._begin(layout, done)
            self._close_spool()
        if self._end is not None and not self._held:
            return False
        if not self._sample():
            return self._window is not None
        layout = self._choose()
        return self._begin(layout, 0) if layout is not None else self._random(0)

    def _begin(self, layout: Layout, first_pack: int) -> bool:
        packs, spool = self._packs, self._spool
        assert packs.machine is not None
        assert spool is not None
        begun = time.perf_counter()
        superbatch = Superbatch(packs.machine, spool, self._counts, layout, first_pack, packs.scratch)
        self._opened.append(superbatch)
        packs.counters["seconds"]["cut"] += time.perf_counter() - begun
        try:
            superbatch.prepare()
            with self._profile("sweep"):
                superbatch.finish_sweep()
        except OSError as error:
            self._count(superbatch)
            superbatch.close()
            log.warning("packs cannot be used, reading by random reads instead: %s", error)
            packs.only_random = str(error)
            return self._random(superbatch.first)
        self._superbatch, self._layout = superbatch, layout
        self._choice["actual_s"] += time.perf_counter() - begun
        self._choice["superbatches"] += 1
        self._choice["packs"] += superbatch.pack_count
        self._choice["resident_rows"] = superbatch.resident_rows
        packs.counters["superbatches"] += 1
        packs.counters["packs"] += superbatch.pack_count
        return True

    def _finish_superbatch(self) -> int:
        superbatch, self._superbatch = self._superbatch, None
        assert superbatch is not None
        superbatch.close()
        self._opened.remove(superbatch)
        self._count(superbatch)
        return superbatch.last_pack

    def _count(self, superbatch: Superbatch) -> None:
        counters = self._packs.counters
        counters["bytes_read"] += superbatch.bytes_read
        counters["bytes_written"] += superbatch.bytes_written
        for name, seconds in superbatch.seconds.items():
            counters["seconds"][name] += seconds

    def _close_spool(self) -> None:
        if self._spool is not None:
            self._packs.counters["bytes_read"] += self._spool.bytes_read
            self._packs.counters["bytes_written"] += self._spool.bytes_written
            self._spool.close()
            self._opened.remove(self._spool)
            self._spool = None

    def _random(self, first: int) -> bool:
        """Go on by random reads to the end: what is in the spool from `first` on, then the rest."""
        self._packs.release()
        self._window = self._host.window(self._remaining(first))
        if self._limit is not None:
            self._window.limit_window(*self._limit)
        self._opened.append(self._window)
        return True

    def _remaining(self, first: int) -> Iterator[T]:
        # A generator over what it needs: an open window must not hold this stream alive.
        return _chained(self._spool, first, self._held, self._source, self._end)

    # --- sampling ahead ---

    def _sample(self) -> bool:
        """Sample into a new spool. False if there is nothing to choose: no minibatch, or no spool."""
        packs = self._packs
        if packs.scratch is None:
            self._random(0)
            return False
        try:
            self._spool = spool = Spool(packs.scratch, 1)
        except OSError as error:
            packs.only_random = str(error)
            log.warning("no scratch file, reading by random reads instead: %s", error)
            self._random(0)
            return False
        self._opened.append(spool)
        self._spaces, self._counts = [], []
        self._pages: dict[str, Any] = {}
        self._largest: tuple[int, Ids, int] | None = None
        self._rows: dict[str, int] = {}
        self._minibatch_bytes = self._wanted_rows = 0
        limit = packs.scratch.limit_bytes // _SPOOL_SHARE
        while len(spool) < _MOST_MINIBATCHES and spool.bytes_written < limit and self._end is None:
            begun = time.perf_counter()
            try:
                with self._profile("sample"), self._observers.stage("sample"):
                    minibatch = self._held.pop() if self._held else next(self._source)
                    ids = self._ids_of(minibatch)
                    if not self._spaces:
                        self._spaces = spaces_of(packs.tables, ids)
                        spool.space_count = len(self._spaces)
                        self._counts = [_core.Counts.create(s.row_count) for s in self._spaces]
                    rows = rows_of(ids, self._spaces)
            except StopIteration:
                self._end = StopIteration()
                break
            except OtherIdsError as error:
                return self._not_packed(minibatch, str(error))
            except Exception as error:
                self._end = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                break
            finally:
                self._seconds["sample"] += time.perf_counter() - begun
            try:
                spool.put(minibatch, rows, tuple(ids))
            except NotSpoolable as error:
                return self._not_packed(minibatch, str(error))
            except StorageError as error:
                self._held.append(minibatch)
                log.info("a superbatch ends after %d minibatches: %s", len(spool), error)
                if not len(spool):
                    return self._not_packed(None, str(error))
                break
            self._note(minibatch, ids, rows)
        return len(spool) > 0

    def _not_packed(self, minibatch: T | None, reason: str) -> bool:
        """Minibatches that packs cannot hold: random reads, now and in later epochs."""
        if minibatch is not None:
            self._held.append(minibatch)
        self._packs.only_random = reason
        log.warning("packs cannot be used, reading by random reads instead: %s", reason)
        self._random(0)
        return False

    def _note(self, minibatch: T, ids: Ids, rows: Sequence[Any]) -> None:
        """Count the rows and pages of a minibatch, and how large the largest one is."""
        for counts, of_space in zip(self._counts, rows, strict=True):
            self._wanted_rows += counts.add(of_space)
        for space, of_space in zip(self._spaces, rows, strict=True):
            for t in space.tables:
                if t.rows_per_page > 1 and self._packs.options.reads == "auto":
                    if t.name not in self._pages:
                        self._pages[t.name] = _core.Counts.create(t.page_count)
                    self._pages[t.name].add(of_space // np.uint32(t.rows_per_page))
        read = rows_read(ids, [t.name for t in self._packs.tables])
        size = sum(read[t.name] * t.row_bytes for t in self._packs.tables)
        self._rows = {name: max(n, self._rows.get(name, 0)) for name, n in read.items()}
        self._minibatch_bytes = max(self._minibatch_bytes, self._bytes_of(minibatch))
        if self._largest is None or size > self._largest[0]:
            self._largest = (size, ids, self._minibatch_bytes)

    # --- the choice ---

    def _choose(self) -> Layout | None:
        """The layout of the cheapest way; None for random reads."""
        packs, spool = self._packs, self._spool
        assert spool is not None
        assert self._largest is not None
        assert packs.scratch is not None
        begun = time.perf_counter()
        count, rates = len(spool), packs.rates()
        consumer_s = packs.consumer_s * count
        memory_bytes = self._host.take_memory()
        plan = self._plan(memory_bytes)
        layouts: dict[Any, Layout] = {}
        if plan is not None:
            layouts = choose_layout(
                spool,
                self._spaces,
                self._counts,
                plan,
                rates,
                ("sweep", "pack") if packs.options.reads == "auto" else (packs.options.reads,),  # type: ignore[arg-type]
                scratch_bytes=packs.scratch.limit_bytes - packs.scratch.taken_bytes,
                consumer_s=consumer_s,
            )
        predicted = {way: layout.predicted_s for way, layout in layouts.items()}
        best = min(layouts.values(), key=lambda layout: layout.predicted_s, default=None)
        if packs.options.reads == "auto":
            predicted["random"] = random_s = max(self._random_s(rates), consumer_s)
            if best is not None and not (
                best.predicted_s <= _WORTH * random_s and random_s - best.predicted_s >= _WORTH_S
            ):
                best = None
        elif best is None:
            self._refuse(memory_bytes)
        packs.counters["seconds"]["cut"] += time.perf_counter() - begun
        way = "random" if best is None else best.way
        self._choice = {
            "way": way,
            "minibatches": count,
            "superbatches": 0,
            "packs": 0,
            "resident_rows": 0,
            "predicted_s": predicted,
            "actual_s": 0.0,
        }
        packs.chosen.append(self._choice)
        log.info(
            "%d minibatches by %s reads: predicted %s",
            count,
            way,
            ", ".join(f"{name} {s:.1f} s" for name, s in sorted(predicted.items())) or "nothing else",
        )
        if best is None:
            if packs.options.reads == "auto":
                packs.only_random = "random reads were cheaper"
            return None
        assert plan is not None
        self._make_machine(plan, rates)
        return best

    def _plan(self, memory_bytes: int) -> PackPlan | None:
        packs = self._packs
        budget = PackBudget(
            spaces=self._spaces,
            output_row_bytes={t.name: out_row_bytes(t, packs.dtype) for t in packs.tables},
            bounce_bytes=packs.bounce_bytes,
            sampler_bytes=self._host.sampler_bytes(),
            memory_bytes=memory_bytes,
        )
        return budget.share(self._rows, self._minibatch_bytes, self._wanted_rows)

    def _make_machine(self, plan: PackPlan, rates: DiskRates) -> None:
        packs = self._packs
        packs.machine = None  # its memory is freed before there is more
        packs.purposes = plan.purposes
        packs.machine = PackMachine(
            self._spaces,
            plan,
            threads=packs.options.threads or torch.get_num_threads(),
            check_crc=packs.options.check_crc,
            output_dtype=packs.dtype,
            output_rows=self._rows,
            engine=packs.options.engine,
            direct=packs.options.direct,
            gap_bytes=rates.gap_bytes,
        )

    def _random_s(self, rates: DiskRates) -> float:
        """Predicted seconds of random reads for the spooled minibatches."""
        assert self._largest is not None
        _, ids, minibatch_bytes = self._largest
        lines = self._host.lines_for(ids, minibatch_bytes)
        if lines is None:
            return math.inf
        seconds = 0.0
        for counts, space in zip(self._counts, self._spaces, strict=True):
            for t in space.tables:
                histogram = np.array((self._pages.get(t.name) or counts).histogram(), np.float64)
                seconds += _misses(histogram, lines[t.name]) / rates.random_reads_per_s
        return seconds

    def _refuse(self, memory_bytes: int) -> None:
        raise MemoryBudgetError(
            f"memory={memory_bytes} ({format_bytes(memory_bytes)}) is too small for reads="
            f"{self._packs.options.reads!r}: a pack must hold the rows of one minibatch, "
            f"{format_bytes(self._largest[0] if self._largest else 0)}, twice, beside its outputs. Give more "
            "memory= to gids.open(), use smaller minibatches, or reads='random'."
        )


def _misses(histogram: Any, lines: int) -> float:
    """Page reads of a cache of so many lines. histogram: pages that 0, 1, 2, … minibatches want."""
    counts = np.arange(len(histogram))
    accesses = histogram * counts
    kept = hits = 0.0
    for count in range(len(histogram) - 1, 0, -1):
        fit = min(histogram[count], lines - kept)
        kept += fit
        hits += fit * (count - 1)  # the first read of each page is a miss
        if kept >= lines:
            break
    return _LOOKAHEAD_GAIN * float(accesses.sum() - hits)


def _chained(
    spool: Spool | None, first: int, held: Sequence[T], source: Iterator[T], end: BaseException | None
) -> Iterator[T]:
    rest: Iterator[T] = iter(()) if spool is None else spool.rest(first)
    yield from itertools.chain(rest, held)
    if end is None:
        yield from source
    elif not isinstance(end, StopIteration):
        raise end


def _close(pid: int, opened: list[Any], on_close: Callable[[], None]) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither the threads nor the memory
    for one in reversed(opened):
        one.close()
    opened.clear()
    on_close()
