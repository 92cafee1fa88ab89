"""PackReads: chooses how the minibatches of a superbatch are read, and keeps what all epochs by packs share.

Made by FeatureLoader, used by PackSwitch. It knows costs and sizes; it reads no rows.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from gids.cache.output_dtype import out_row_bytes
from gids.errors import MemoryBudgetError, StorageError
from gids.io.disks import disk_count
from gids.loader.epoch_stream import Sampled, close_parts
from gids.loader.lending import Lender
from gids.loader.options import Options
from gids.loader.readers import Ids, Reader
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import (
    Ahead,
    DiskRates,
    HostGather,
    HostRows,
    Layout,
    OnDevice,
    PackBudget,
    PackMachine,
    PackPlan,
    Resident,
    RowMemory,
    Scratch,
    Superbatch,
    Work,
    measure_rates,
    sweep_seconds,
)
from gids.sizes import format_bytes
from gids.store import Table

T = TypeVar("T")
log = logging.getLogger("gids")

LEAST_BYTES = 256 << 20
"""Smaller tables are always read by random reads, unless packs are asked for."""

EARLY = 16
"""Minibatches after which packs are given up if they clearly lose."""

LEAST_WAIT_S = 4.0
"""Packs are not considered, nor the disk measured, for an epoch that would wait for it less than this."""

MOST_READS_PER_S = 1e6
"""No disk makes more random reads."""

_CLEARLY = 0.6
"""Random reads that take at most this share of the time of packs clearly win."""

_LOOKAHEAD_GAIN = 0.9
"""Misses of the look-ahead cache, relative to a cache that keeps the most wanted pages."""

_WORTH_S = 1.0
"""Packs must save this many seconds of a superbatch."""

_WORTH = 0.97
"""Packs must take at most this share of the time of random reads. When it is known, they are cut already."""

_IDLE = 0.2
"""What a superbatch took is compared with its prediction if the consumer took at most this share of it."""

_MOST_SLOWER = 4.0
"""Predictions are corrected by at most this factor."""

_SHORT_S = 0.5
"""Shorter predictions are mostly noise."""

_MARGIN = 16
"""Memory is shared out for minibatches that are larger than those of the first superbatch by 1/16."""

_UNKNOWN_COUNT = 1024
"""Minibatches of an epoch whose number is not known."""

_LEAST_SHARE = 0.75
"""The next epoch is sampled, and swept, if at least this share of the memory for packs is left."""

_CHEAPER = "random reads are cheaper"


class Together(Protocol):
    """What processes that sample the same steps together decide together, in each stream of minibatches.

    overlap: whether a superbatch may be sampled while the one before is trained.
    """

    overlap: bool

    def agree(self, wanted: int, room: int) -> int:
        """Called once EARLY minibatches are sampled: how many shall be sampled ahead; 0: random reads.

        wanted: how many this process wants, 0 for random reads. room: how many the spool has room for.
        """
        ...

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Called when the packs of a superbatch are being made: wait until they are ready."""
        ...


class Alone:
    """One process decides for itself."""

    overlap = True

    def agree(self, wanted: int, room: int) -> int:
        return wanted

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Superbatch.begin() waits."""


@dataclass(frozen=True)
class PackHost:
    """What packs ask of their FeatureLoader.

    sampler_bytes: memory of the sampler. waiting: sampled minibatches that the source holds. reader: one that
    reads minibatches by random reads. lines_for: the lines that the cache would have for minibatches
    like this one, by table; None if they do not fit.
    memory_bytes: borrows the memory of other loaders; returns the bytes that packs may take once the cache is
    freed. free_cache: frees it.
    together: what other processes take part in.
    """

    sampler_bytes: Callable[[], int]
    waiting: Callable[[], int]
    reader: Callable[[], Reader]
    lines_for: Callable[[Ids, int], Mapping[str, int] | None]
    memory_bytes: Callable[[], int]
    free_cache: Callable[[], None]
    together: Together


@dataclass(eq=False)
class Learned:
    """What a loader learned about its own epochs. Other loaders of the same source learn for themselves.

    consumer_s: seconds that the consumer takes for a minibatch, 0 at first. longest: minibatches of the
    longest epoch. why_random: why epochs of at most random_count minibatches do not consider packs, or "".
    slower: actual seconds of packs over predicted ones, once known. choices: all; choice: the last one that
    later ones learn from. by_packs: whether packs were chosen last, and are soon made. next_epoch: what is
    prepared of it, or None.
    """

    consumer_s: float = 0.0
    longest: int = 0
    why_random: str = ""
    random_count: float = 0
    slower: float | None = None
    choices: list[dict[str, Any]] = field(default_factory=list)
    choice: dict[str, Any] | None = None
    by_packs: bool = False
    next_epoch: NextEpoch | None = None

    def random(self, count: int | None) -> bool:
        """Whether an epoch of so many minibatches reads at random. None: it is not known."""
        return bool(self.why_random) and 0 < (count or self.longest) <= self.random_count

    def ended(self, count: int) -> None:
        """An epoch of so many minibatches came to its end."""
        self.longest = max(self.longest, count)

    def read_at_random(self, reason: str, count: float = math.inf) -> None:
        """Do not consider packs for epochs of at most so many minibatches."""
        self.why_random, self.random_count = reason, max(count, self.random_count)
        self.by_packs = False
        self.drop_next()

    def drop_next(self) -> None:
        """Drop what is prepared of the next epoch."""
        coming, self.next_epoch = self.next_epoch, None
        if coming is not None:
            coming.close()


class NextEpoch:
    """Minibatches of a loader's next epoch, which are sampled and swept to scratch while this one is trained.

    It lasts from one stream to the next: until take() or close(), or until its loader is dropped.

    minibatches: what the loader will give to attach(). source: of them. opened: what a stream must close.
    counters: those of PackReads, which get what is read and written for nothing.
    """

    def __init__(
        self,
        minibatches: Iterable[Any],
        source: Sampled[Any],
        sampled: SampledAhead[Any],
        counters: dict[str, Any],
    ) -> None:
        self.minibatches, self.source, self.sampled, self._counters = minibatches, source, sampled, counters
        self.machine: PackMachine | None = None
        self._making: Future[Superbatch | None] | None = None
        self._lists_bytes = 0
        self.opened: list[Any] = [sampled]
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, close_parts, os.getpid(), self.opened)

    @property
    def nbytes(self) -> int:
        """Memory that it takes beside what is read meanwhile."""
        if self.machine is None:
            return self.sampled.counts_bytes
        return self.machine.plan.beside_bytes(self._lists_bytes)

    @property
    def open(self) -> bool:
        """Whether it was neither taken nor dropped."""
        return self._finalizer.alive

    @property
    def here(self) -> bool:
        """Whether it may be taken: a forked child has none of the threads."""
        return self.open and os.getpid() == self._pid

    @property
    def begun(self) -> bool:
        """Whether make() was called."""
        return self.machine is not None

    def make(self, machine: PackMachine, lists_bytes: int, make: Callable[[], Superbatch | None]) -> None:
        """Make packs in a thread, once all is sampled. lists_bytes: of their row lists, at most."""
        self.machine, self._lists_bytes = machine, lists_bytes
        made = _Making(make)
        self._making = made.superbatch
        self.opened.append(made)

    def take(self) -> Superbatch | None:
        """The packs; None if there are none. Blocks until they are being swept. Others close what is open."""
        superbatch = None if self._making is None else self._making.result()
        self._finalizer.detach()
        self.opened[1:] = [] if superbatch is None else [superbatch]
        self.sampled.spool.file.spare = False
        if superbatch is not None:
            superbatch.file.spare = False
        return superbatch

    def close(self) -> None:
        """Drop what is prepared. Idempotent."""
        if self.here:
            self._finalizer()
            parts: list[Any] = [self.sampled.spool]
            if self._making is not None and not self._making.exception():
                parts.append(self._making.result())
            for counter in ("bytes_read", "bytes_written"):
                self._counters[counter] += sum(getattr(part, counter) for part in parts if part is not None)


class _Making:
    """A superbatch that a thread makes."""

    def __init__(self, make: Callable[[], Superbatch | None]) -> None:
        thread = ThreadPoolExecutor(1, "gids-next")
        self.superbatch = thread.submit(make)
        thread.shutdown(wait=False)

    def close(self) -> None:
        with suppress(Exception):  # take() raises it
            superbatch = self.superbatch.result()
            if superbatch is not None:
                superbatch.close()


class PackReads:
    """tables: of the loader. dtype: of the features, or None for the stored one. bounce_bytes: memory of the
    loader's engine. lender: of the source. device: where packs are in device memory.

    Attributes: machine: has the memory of packs, or is None; learned: of the loader whose epoch is open;
    beside_bytes: taken beside the cache, while packs are prepared.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        options: Options,
        dtype: torch.dtype | None,
        bounce_bytes: int,
        lender: Lender,
        device: OnDevice | None = None,
    ) -> None:
        self._device, self._lender = device, lender
        self.tables, self.options, self._dtype, self._bounce_bytes = tables, options, dtype, bounce_bytes
        self.machine: PackMachine | None = None
        self.learned = Learned()
        self.beside_bytes = 0
        self.counters: dict[str, Any] = {
            "superbatches": 0,
            "packs": 0,
            "minibatches": 0,
            "bytes_read": 0,
            "bytes_written": 0,
            "seconds": {"cut": 0.0, "sweep": 0.0, "wait": 0.0, "gather": 0.0},
        }
        self.choices: list[dict[str, Any]] = []
        self._next_epochs: weakref.WeakSet[NextEpoch] = weakref.WeakSet()  # of all loaders
        self._room_bytes = 0  # of a minibatch that the machine has room for
        self._scratch: Scratch | None = None
        self._looked = False

    @property
    def scratch(self) -> Scratch | None:
        """Where packs go; looked for once."""
        if not self._looked:
            self._scratch = self._lender.scratch(
                self.options, [path for t in self.tables for path in t.shard_paths]
            )
            self._looked = True
        return self._scratch

    @cached_property
    def _disk_count(self) -> int:
        return disk_count(path for t in self.tables for path in t.shard_paths)

    @property
    def on_device(self) -> bool:
        return self._device is not None

    def rates(self) -> DiskRates:
        """Of the disk, for pages of the table with most bytes."""
        table = max(self.tables, key=lambda t: t.page_count * t.page_bytes)
        return measure_rates(
            [shard for t in self.tables for shard in t.shards],
            self.scratch,
            page_bytes=table.page_bytes,
            depth=self.options.queue_depth,
            direct=self.options.direct,
            engine=self.options.engine,
            memory_bytes=self._lender.host_bytes,
        )

    def expected_count(self, known: int | None) -> int:
        """Minibatches of an epoch, at least 1."""
        return known or self.learned.longest or _UNKNOWN_COUNT

    def choose_early(
        self, sampled: SampledAhead[Any], host: PackHost, count: int | None, ahead: Ahead
    ) -> bool:
        """Whether random reads win for sure, judged by the first minibatches; then the choice is made.

        That is so if they win by far even if sweeps take no time, or if they take no longer than a sweep and
        what packs must save. count: minibatches of the epoch that are left. ahead: what goes on while
        they are trained.
        """
        if self.options.reads != "auto":
            return False
        layout = self._layout(sampled, memory_bytes := host.memory_bytes(), host, ahead)
        random_s, sweep_s = self.random_s(sampled, host), self.sweep_s(sampled)
        times = max(1.0, (count or 0) / len(sampled.spool))
        kept_s = 0.0 if layout is None else layout.predicted_s - sweep_s
        wins = random_s <= _CLEARLY * kept_s
        if count is not None and self.learned.slower is None:
            train_s = self.learned.consumer_s * count
            most_s = max(times * random_s, train_s)  # more minibatches hit more often
            wins = wins or not _pays(max(sweep_s, train_s), most_s)
        if layout is None and not wins:
            self._advise(sampled, memory_bytes, host, times)
            wins = True  # later minibatches do not make the memory larger
        if wins:
            self._record(None, sampled, self._corrected(layout) | {"random": random_s}, times)
            judged = math.inf if count is None else sampled.base + count
            self.learned.read_at_random(_CHEAPER, judged)
        return wins

    def sweep_s(self, sampled: SampledAhead[Any]) -> float:
        """Predicted seconds of a sweep for the sampled minibatches."""
        pairs = zip(sampled.counts, sampled.spaces, strict=True)
        wanted = [space.row_count - of.histogram()[0] for of, space in pairs]
        return sweep_seconds(sampled.spaces, wanted, self.rates())

    def choose(self, sampled: SampledAhead[Any], host: PackHost, count: int | None = None) -> Layout | None:
        """The layout of the cheapest way; None for random reads.

        count: minibatches of the epoch from the first sampled one on; if random reads win, they read all.
        Raises MemoryBudgetError if packs were asked for and do not fit.
        """
        memory_bytes = host.memory_bytes()
        if sampled.next_epoch:
            sampled.next_epoch = self._most_ahead(sampled, memory_bytes, host)
        layout = self._layout(sampled, memory_bytes, host, sampled.ahead)
        if layout is None and sampled.next_epoch:
            sampled.next_epoch = Ahead.NOTHING
            layout = self._layout(sampled, memory_bytes, host, sampled.ahead)
        self._learn()
        predicted = self._corrected(layout)
        if self.options.reads == "auto":
            left = len(sampled.spool) - sampled.done
            random_s = self.random_s(sampled, host) * left / len(sampled.spool)
            random_s = max(random_s, self.learned.consumer_s * left)
            predicted["random"] = random_s
            if layout is not None and not _pays(predicted["pack"], random_s):
                layout = None
        elif layout is None:
            raise MemoryBudgetError(self._too_little(sampled, memory_bytes, host))
        times = max(1.0, (count or 0) / len(sampled.spool)) if layout is None else 1.0
        self._record(layout, sampled, predicted, times)
        if layout is None:
            judged = sampled.base + max(count or 0, len(sampled.spool))
            self.learned.read_at_random(_CHEAPER, judged if count or sampled.last else math.inf)
        return layout

    def choose_again(self, sampled: SampledAhead[Any], resident: Resident) -> Layout | None:
        """The layout of the next superbatch beside the present resident rows; None if it does not fit."""
        assert self.machine is not None
        if not self._has_room(sampled):
            return None
        layout = self._work(sampled, self.machine.plan).choose(resident)
        if layout is not None:
            self.chosen(layout, sampled)
        return layout

    def chosen(self, layout: Layout, sampled: SampledAhead[Any]) -> None:
        """Note the layout of choose_again(), or of a next epoch."""
        self._learn()
        self._record(layout, sampled, self._corrected(layout))

    def begin_next(self, coming: NextEpoch) -> None:
        """Keep what is prepared of the next epoch of the loader whose epoch is open."""
        assert self.scratch is not None
        self.learned.next_epoch = coming
        self._next_epochs.add(coming)
        self.scratch.spares.add(coming)

    def prepared(self, minibatches: Iterable[Any]) -> NextEpoch | None:
        """What is prepared of the epoch that begins now. What was prepared of another one is dropped."""
        coming = self.learned.next_epoch
        if coming is None or coming.minibatches is not minibatches or not coming.here:
            self.learned.drop_next()
            return None
        assert self.scratch is not None
        self.learned.next_epoch = None
        self._next_epochs.discard(coming)
        self.scratch.spares.discard(coming)
        return coming

    @property
    def next_bytes(self) -> int:
        """Memory of what is prepared of next epochs."""
        return sum(coming.nbytes for coming in self._next_epochs if coming.open)

    def make_next(self, coming: NextEpoch, resident: Resident) -> None:
        """Begin to make the packs of the next epoch, whose minibatches are sampled, with these resident rows.

        They are written to scratch, too, so that the memory is free between the epochs.
        """
        assert self.machine is not None
        assert self.scratch is not None
        sampled, scratch, machine = coming.sampled, self.scratch, self.machine.again()
        work, room_bytes = self._work(sampled, machine.plan), self.room_bytes(sampled)

        def make() -> Superbatch | None:
            """In a thread. Without packs, the next epoch makes them when it begins."""
            superbatch = None
            try:
                layout = work.choose(resident)
                if layout is None:
                    return None
                superbatch = Superbatch(
                    machine,
                    sampled.spool,
                    layout,
                    0,
                    scratch,
                    room_bytes=room_bytes,
                    fill_resident=True,
                    beside=True,
                )
                superbatch.prepare(spare=True)
            except Exception as error:
                log.info("packs of the next epoch are not made yet: %r", error)
                if superbatch is not None:
                    superbatch.close()
                return None
            sampled.forget_counts()
            return superbatch

        if machine.plan.overlap and self._has_room(sampled):
            coming.make(machine, resident.lists_bytes, make)

    def _has_room(self, sampled: SampledAhead[Any]) -> bool:
        """Whether the present plan has room for minibatches like these."""
        assert self.machine is not None
        room = self.machine.output_rows
        larger = any(rows > room[name] for name, rows in sampled.rows.items())
        return not larger and sampled.minibatch_bytes <= self._room_bytes

    def _most_ahead(self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost) -> Ahead:
        """What memory allows to do for the next epoch while these minibatches are trained."""
        plans = [self._plan(sampled, memory_bytes, host, ahead) for ahead in Ahead]
        alone, *beside = (0 if plan is None else plan.pack_bytes for plan in plans)
        enough = [0 < nbytes >= _LEAST_SHARE * alone for nbytes in beside]
        return Ahead.SWEPT if enough[1] else Ahead.SAMPLED if enough[0] else Ahead.NOTHING

    def give_up(self, reason: str) -> None:
        """Use random reads from now on. Warns once."""
        if not self.learned.why_random:
            log.warning("packs cannot be used, reading by random reads instead: %s", reason)
        self.learned.read_at_random(reason)

    def stats(self) -> dict[str, Any]:
        """Counters, and each superbatch's choice."""
        seconds = dict(self.counters["seconds"])
        return {**self.counters, "seconds": seconds, "choices": [dict(c) for c in self.choices]}

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; empty while packs have no memory. "outputs" is the peak."""
        if self.machine is None:
            return {}
        plan, rows = self.machine.plan, self.machine.rows
        second = plan.purposes["second stream"] + rows.second_output_bytes
        return {**plan.purposes, "outputs": rows.peak_output_bytes, "second stream": second}

    def spooling(self) -> AbstractContextManager[object]:
        """A context in which sampled minibatches are copied to the spool."""
        return nullcontext() if self._device is None else self._device.copies.use()

    def settle(self) -> None:
        """Wait until minibatches that came from the spool are complete."""
        if self._device is not None:
            self._device.settle()

    def settled(self, minibatches: Iterable[T]) -> Iterable[T]:
        """Minibatches of the spool, each complete when it is taken."""
        return minibatches if self._device is None else self._device.settled(minibatches)

    def close(self) -> None:
        """Free all memory, and what is prepared of next epochs. Idempotent."""
        for coming in list(self._next_epochs):
            coming.close()
        self.release()

    def release(self) -> None:
        """Free the memory of packs. Between epochs only."""
        if self.machine is not None:
            self.machine.close()
        self.machine = None

    def random_s(self, sampled: SampledAhead[Any], host: PackHost) -> float:
        """Predicted seconds of random reads for the sampled minibatches."""
        lines = host.lines_for(sampled.largest, sampled.minibatch_bytes)
        if lines is None:
            return math.inf
        rates, seconds = self.rates(), 0.0
        for counts, space in zip(sampled.counts, sampled.spaces, strict=True):
            for t in space.tables:
                histogram = (sampled.pages.get(t.name) or counts).histogram()
                seconds += _misses(np.array(histogram, np.float64), lines[t.name]) / rates.random_reads_per_s
        return float(seconds)

    def _learn(self) -> None:
        """Compare the last superbatch that was trained whole with its prediction, to correct later ones."""
        last, learned = self.learned.choice, self.learned
        if last is None or last["way"] == "random" or last["returned"] != last["minibatches"]:
            return
        if learned.consumer_s * last["returned"] < _IDLE * last["actual_s"]:
            slower = (learned.slower or 1.0) * last["actual_s"] / max(_SHORT_S, last["predicted_s"]["pack"])
            learned.slower = min(_MOST_SLOWER, max(1 / _MOST_SLOWER, slower))

    def _corrected(self, layout: Layout | None) -> dict[str, float]:
        """Predicted seconds of packs; empty if they are impossible."""
        return {} if layout is None else {"pack": layout.predicted_s * (self.learned.slower or 1.0)}

    def random_choice(self, minibatches: int) -> dict[str, Any]:
        """The choice of random reads that was made last; a new one where packs were chosen, and failed."""
        if self.choices[-1]["way"] != "random":
            self._add_choice("random", minibatches, {})
        return self.choices[-1]

    def _record(
        self,
        layout: Layout | None,
        sampled: SampledAhead[Any],
        predicted: Mapping[str, float],
        times: float = 1.0,
    ) -> None:
        predicted = {name: s * times for name, s in predicted.items()}
        way = "random" if layout is None else "pack"
        self._add_choice(way, round(len(sampled.spool) * times) - sampled.done, predicted)
        seconds = ", ".join(f"{name} {s:.1f} s" for name, s in sorted(predicted.items()))
        log.info("%d minibatches by %s reads: predicted %s", self.choices[-1]["minibatches"], way, seconds)

    def _add_choice(self, way: str, minibatches: int, predicted: Mapping[str, float]) -> None:
        self.choices.append(
            {
                "way": way,
                "minibatches": minibatches,
                "returned": 0,
                "superbatches": 0,
                "packs": 0,
                "resident_rows": 0,
                "predicted_s": predicted,
                "actual_s": 0.0,
            }
        )
        self.learned.choice = self.choices[-1]
        self.learned.choices.append(self.choices[-1])

    def _layout(
        self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost, ahead: Ahead
    ) -> Layout | None:
        """The cheapest layout; None if packs do not fit. Raises StorageError if scratch cannot be written."""
        if not self.rates().write_bytes_per_s:
            assert self.scratch is not None
            raise StorageError(errno.ENOSPC, "scratch cannot be written", self.scratch.directory)
        plan = self._plan(sampled, memory_bytes, host, ahead)
        return None if plan is None else self._work(sampled, plan).choose()

    def _work(self, sampled: SampledAhead[Any], plan: PackPlan) -> Work:
        return Work(
            spool=sampled.spool,
            spaces=sampled.spaces,
            counts=sampled.counts,
            plan=plan,
            rates=self.rates(),
            scratch_bytes=self.room_bytes(sampled),
            consumer_s=self.learned.consumer_s * len(sampled.spool),
            parts=self._device is None,
        )

    def room_bytes(self, sampled: SampledAhead[Any]) -> int:
        """Scratch for the packs of a superbatch. If another one is swept meanwhile, both must fit."""
        assert self.scratch is not None
        left = self.scratch.free_bytes(spare=sampled.spool.file.spare)
        return left // 2 if sampled.ahead is Ahead.SWEPT else left

    def _budget(self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost) -> PackBudget:
        make = PackBudget if self._device is None else self._device.budget
        return make(
            spaces=sampled.spaces,
            output_row_bytes={t.name: out_row_bytes(t, self._dtype) for t in self.tables},
            bounce_bytes=self._bounce_bytes,
            sampler_bytes=_room(host.sampler_bytes()),
            waiting=host.waiting(),
            memory_bytes=memory_bytes,
            disks=self._disk_count,
        )

    def _plan(
        self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost, ahead: Ahead
    ) -> PackPlan | None:
        budget = self._budget(sampled, memory_bytes, host)
        return budget.share(_room_rows(sampled), _room(sampled.minibatch_bytes), ahead)

    def new_machine(self, sampled: SampledAhead[Any], host: PackHost) -> PackMachine:
        """For the packs that choose() chose. On the host, memory is taken when rows are written to it."""
        plan = self._plan(sampled, host.memory_bytes(), host, sampled.ahead)
        assert plan is not None
        self._room_bytes = _room(sampled.minibatch_bytes)
        threads, output_rows = self.options.threads or torch.get_num_threads(), _room_rows(sampled)

        def rows() -> RowMemory:
            gather = HostGather(
                self.tables,
                threads=threads,
                output_dtype=self._dtype,
                pool_bytes=plan.purposes["outputs"] if self._device is None else 0,
                output_rows=output_rows,
            )
            if self._device is None:
                return HostRows(gather, plan.pack_bytes)
            return self._device.rows(
                gather,
                sampled.spaces,
                plan,
                self._budget(sampled, host.memory_bytes(), host),
                output_dtype=self._dtype,
                output_rows=output_rows,
            )

        return PackMachine(
            sampled.spaces,
            plan,
            rows,
            threads=threads,
            check_crc=self.options.check_crc,
            output_rows=output_rows,
            engine=self.options.engine,
            direct=self.options.direct,
            gap_bytes=self.rates().gap_bytes,
            parts=self._device is None,
        )

    def _advise(self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost, times: float) -> None:
        """Warn that packs do not fit, and say what memory they need and what they would save."""
        random_s, rates = times * self.random_s(sampled, host), self.rates()
        pairs = list(zip(sampled.counts, sampled.spaces, strict=True))
        wanted = [sum(i * n for i, n in enumerate(of.histogram())) for of, _ in pairs]
        nbytes = times * sum(n * space.row_bytes for n, (_, space) in zip(wanted, pairs, strict=True))
        packed_s = self.sweep_s(sampled) + nbytes * (1 / rates.write_bytes_per_s + 1 / rates.read_bytes_per_s)
        if not _pays(packed_s, random_s):
            return
        needed = self._budget(sampled, memory_bytes, host).needed(
            _room_rows(sampled), _room(sampled.minibatch_bytes), Ahead.NOTHING
        )
        log.warning(
            "memory=%d (%s) is too small for packs, so rows are read at random, in about %.0f s: with "
            "memory=%d (%s) packs would take about %.0f s",
            memory_bytes,
            format_bytes(memory_bytes),
            random_s,
            room := _room(_room(sum(needed.values()))),
            format_bytes(room),
            packed_s,
        )

    def _too_little(self, sampled: SampledAhead[Any], memory_bytes: int, host: PackHost) -> str:
        largest = sum(sampled.rows[t.name] * t.row_bytes for t in self.tables)
        purposes = self._budget(sampled, memory_bytes, host).needed(
            _room_rows(sampled), _room(sampled.minibatch_bytes), sampled.ahead
        )
        there = also = ""
        if self._device is not None:
            n = self._device.memory_bytes
            there, also = f", or device_memory={n} ({format_bytes(n)}),", " or device_memory="
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        return (
            f"memory={memory_bytes} ({format_bytes(memory_bytes)}){there} is too small for reads="
            f"{self.options.reads!r}: {listing} + two packs of {format_bytes(largest)} do not fit. Give more "
            f"memory={also} to gids.open(), use smaller minibatches, or reads='random'."
        )


def _pays(packed_s: float, random_s: float) -> bool:
    """Whether packs save enough time."""
    return packed_s <= _WORTH * random_s and random_s - packed_s >= _WORTH_S


def _room(of: int) -> int:
    return of + of // _MARGIN


def _room_rows(sampled: SampledAhead[Any]) -> dict[str, int]:
    return {name: _room(rows) for name, rows in sampled.rows.items()}


def _misses(histogram: Any, lines: int) -> float:
    """Page reads of a cache of so many lines. histogram: pages that 0, 1, 2, … minibatches want."""
    accesses = float((histogram * np.arange(len(histogram))).sum())
    kept = hits = 0.0
    for count in range(len(histogram) - 1, 0, -1):
        fit = min(histogram[count], lines - kept)
        kept += fit
        hits += fit * (count - 1)  # the first read of each page is a miss
        if kept >= lines:
            break
    return _LOOKAHEAD_GAIN * (accesses - hits)
