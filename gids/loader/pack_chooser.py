"""PackChooser: chooses, for one stream, how the minibatches of a superbatch are read. It reads no rows.

Made by FeatureLoader, used by PackSwitch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gids.cache.budget import OTHERS, advised_bytes
from gids.cache.output_dtype import out_row_bytes
from gids.errors import MemoryBudgetError
from gids.loader.learned import Choice, NextEpoch
from gids.loader.memory import least_memory
from gids.loader.pack_reads import PackReads
from gids.loader.sampled_ahead import SampledAhead
from gids.packs import (
    DeviceRows,
    HostRows,
    Layout,
    PackBudget,
    PackMachine,
    PackPlan,
    Resident,
    RowMemory,
    Superbatch,
    Work,
    sweep_seconds,
)
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader
    from gids.loader.row_source import EpochInput

log = logging.getLogger("gids")

EARLY = 16
"""Minibatches after which packs are given up if they clearly lose."""

_CLEARLY = 0.6
"""Packs of many minibatches take at least this share of what those of the first ones take per minibatch: they
share more rows."""

_LOOKAHEAD_GAIN = 0.9
"""Misses of the look-ahead cache, relative to a cache that keeps the most wanted pages."""

_WORTH_S = 1.0
"""Packs must save this many seconds of a superbatch."""

_MARGIN = 16
"""Memory is shared out for minibatches that are larger than those of the first superbatch by 1/16."""

_UNKNOWN_COUNT = 1024
"""Minibatches of an epoch whose number is not known."""

_LEAST_SHARE = 0.75
"""The next epoch is made while one is trained if at least this share of the memory for packs is left."""

_CHEAPER = "random reads are cheaper"


class PackChooser:
    """For one epoch. packs: of the loader."""

    def __init__(self, packs: PackReads, loader: FeatureLoader, epoch: EpochInput[Any]) -> None:
        self._packs, self._loader, self._epoch, self._learned = packs, loader, epoch, epoch.learned

    def expected_count(self, known: int | None) -> int:
        """Minibatches of an epoch, at least 1."""
        return known or self._learned.longest or _UNKNOWN_COUNT

    def choose_early(self, sampled: SampledAhead[Any], count: int | None) -> bool:
        """Whether random reads win for sure, judged by the first minibatches; then the choice is made.

        That is so if all minibatches would cost packs at least about as much as random reads at most. Packs
        wait until other processes have sampled, and random reads do not. count: minibatches that are left.
        """
        if self._packs.options.reads != "auto":
            return False
        layout = self._layout(sampled, memory_bytes := self._loader.pack_bytes(), False)
        early, expected = len(sampled.spool), self.expected_count(count)
        times, train_s = max(1.0, expected / early), expected * self._learned.consumer_s
        random_s, sampled_s = self.random_s(sampled), expected * (sampled.beside_s or 0.0)
        least_s = sweep_s = self.sweep_s(sampled)
        if layout is not None:
            least_s += _CLEARLY * times * (layout.predicted_s - sweep_s)
        most_s = max(times * random_s, train_s, sampled_s)  # more minibatches hit more often
        wins = not _pays(sampled_s + max(least_s, train_s), most_s)
        if layout is None and not wins:
            self._advise(sampled, memory_bytes, times)
            wins = True  # later minibatches do not make the memory larger
        if wins:
            seconds = {} if layout is None else {"pack": layout.predicted_s}
            self._record(None, sampled, seconds | {"random": random_s}, (count or early) / early)
            judged = math.inf if count is None else sampled.base + count
            self._learned.read_at_random(_CHEAPER, judged)
        return wins

    def sweep_s(self, sampled: SampledAhead[Any]) -> float:
        """Predicted seconds of a sweep for the sampled minibatches."""
        tables = self._packs.tables
        wanted = [t.row_count - c.histogram()[0] for t, c in zip(tables, sampled.counts, strict=True)]
        return sweep_seconds(tables, wanted, self._packs.rates())

    def choose(self, sampled: SampledAhead[Any], count: int | None = None) -> Layout | None:
        """The layout of the cheapest way; None for random reads.

        count: minibatches of the epoch from the first sampled one on; if random reads win, they read all.
        Raises MemoryBudgetError if packs were asked for and do not fit.
        """
        memory_bytes = self._loader.pack_bytes()
        # In the midst of an epoch the sampler keeps its memory, for which only the plan for two has room.
        sampled.room_for_two = not sampled.last or self._has_room_for_two(sampled, memory_bytes)
        layout = self._layout(sampled, memory_bytes, sampled.overlap)
        if layout is None and sampled.overlap:
            sampled.room_for_two = False
            layout = self._layout(sampled, memory_bytes, False)
        predicted = {} if layout is None else {"pack": layout.predicted_s}
        if self._packs.options.reads == "auto":
            train_s = self._learned.consumer_s * len(sampled.spool)
            predicted["random"] = random_s = max(self.random_s(sampled), train_s)
            if layout is not None and not _pays(predicted["pack"], random_s):
                layout = None
        elif layout is None:
            raise MemoryBudgetError(self._too_little(sampled, memory_bytes))
        times = max(1.0, (count or 0) / len(sampled.spool)) if layout is None else 1.0
        self._record(layout, sampled, predicted, times)
        if layout is None:
            judged = sampled.base + max(count or 0, len(sampled.spool))
            self._learned.read_at_random(_CHEAPER, judged if count or sampled.last else math.inf)
        return layout

    def choose_again(self, sampled: SampledAhead[Any], resident: Resident) -> Layout | None:
        """The layout of the next superbatch beside the present resident rows; None if it does not fit."""
        assert self._packs.machine is not None
        if not self._has_room(sampled):
            return None
        return self._work(sampled, self._packs.machine.plan).choose(resident)

    def chosen(self, layout: Layout, sampled: SampledAhead[Any]) -> None:
        """Note the layout of choose_again(), or of a next epoch, once packs are made of it."""
        self._record(layout, sampled, {"pack": layout.predicted_s})

    def make_next(self, coming: NextEpoch, resident: Resident) -> None:
        """Begin to make the packs of the next epoch, whose minibatches are sampled, with these resident rows.

        They are written to scratch, too, so that the memory is free between the epochs.
        """
        assert self._packs.machine is not None
        assert self._packs.scratch is not None
        sampled, scratch, machine = coming.sampled, self._packs.scratch, self._packs.machine.again()
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
        assert self._packs.machine is not None
        machine = self._packs.machine
        larger = any(rows > machine.output_rows[name] for name, rows in sampled.rows.items())
        return not larger and sampled.minibatch_bytes <= machine.minibatch_bytes

    def _has_room_for_two(self, sampled: SampledAhead[Any], memory_bytes: int) -> bool:
        """Whether memory allows to make the next epoch while these minibatches are trained."""
        alone, both = (self._plan(sampled, memory_bytes, overlap) for overlap in (False, True))
        return both is not None and (alone is None or both.pack_bytes >= _LEAST_SHARE * alone.pack_bytes)

    def give_up(self, reason: str, count: float = math.inf) -> None:
        """Use random reads from now on, for epochs of at most so many minibatches. Warns once."""
        if not self._learned.why_random:
            log.warning("packs cannot be used, reading by random reads instead: %s", reason)
        self._learned.read_at_random(reason, count)
        self._packs.free_kept()

    def new_machine(self, sampled: SampledAhead[Any]) -> PackMachine:
        """For the packs that choose() chose. On the host, memory is taken when rows are written to it."""
        packs, options = self._packs, self._packs.options
        device, tables, dtype = packs.device, packs.tables, packs.dtype
        plan = self._plan(sampled, self._loader.pack_bytes(), sampled.overlap)
        assert plan is not None
        threads, output_rows = options.threads or torch.get_num_threads(), _room_rows(sampled)

        def rows() -> RowMemory:  # it must not refer to what ends before the machine
            if device is None:
                return HostRows(tables, plan, threads=threads, output_dtype=dtype, output_rows=output_rows)
            return DeviceRows(device.device, tables, plan, output_dtype=dtype, output_rows=output_rows)

        return PackMachine(
            tables=tables,
            plan=plan,
            make_rows=rows,
            threads=threads,
            check_crc=options.check_crc,
            output_rows=output_rows,
            minibatch_bytes=_room(sampled.minibatch_bytes),
            engine=options.engine,
            direct=options.direct,
            gap_bytes=packs.rates().gap_bytes,
            parts=packs.device is None,
            counters=packs.counters,
            seconds=packs.seconds,
        )

    def random_s(self, sampled: SampledAhead[Any]) -> float:
        """Predicted seconds of random reads for the sampled minibatches."""
        lines = self._loader.lines_for(self._epoch, sampled.largest, sampled.minibatch_bytes)
        if lines is None:
            return math.inf
        rates, seconds = self._packs.rates(), 0.0
        for t, counts in zip(self._packs.tables, sampled.counts, strict=True):
            histogram = (sampled.pages.get(t.name) or counts).histogram()
            seconds += _misses(np.array(histogram, np.float64), lines[t.name]) / rates.random_reads_per_s
        return float(seconds)

    def random_choice(self, minibatches: int) -> Choice:
        """The choice of random reads that was made last; a new one where packs were chosen, and failed."""
        if self._learned.choices[-1].way != "random":
            self._note(Choice("random", minibatches))
        return self._learned.choices[-1]

    def room_bytes(self, sampled: SampledAhead[Any]) -> int:
        """Scratch for the packs of a superbatch. If another one is swept meanwhile, both must fit."""
        assert self._packs.scratch is not None
        left = self._packs.scratch.free_bytes(spare=sampled.spool.file.spare)
        return left // 2 if sampled.overlap else left

    def _record(
        self,
        layout: Layout | None,
        sampled: SampledAhead[Any],
        predicted: Mapping[str, float],
        times: float = 1.0,
    ) -> None:
        predicted = {name: s * times for name, s in predicted.items() if math.isfinite(s)}
        way = "random" if layout is None else "pack"
        choice = Choice(way, round(len(sampled.spool) * times), predicted)
        self._note(choice)
        seconds = ", ".join(f"{name} {s:.1f} s" for name, s in sorted(predicted.items())) or "nothing"
        log.info("%d minibatches by %s reads: predicted %s", choice.minibatches, way, seconds)

    def _note(self, choice: Choice) -> None:
        self._packs.choices.append(choice)
        self._learned.choices.append(choice)

    def _layout(self, sampled: SampledAhead[Any], memory_bytes: int, overlap: bool) -> Layout | None:
        """The cheapest layout; None if packs do not fit, or, with reads="auto", if a sweep is for fewer than
        EARLY minibatches. Raises StorageError if scratch cannot be written."""
        plan = self._plan(sampled, memory_bytes, overlap)
        layout = None if plan is None else self._work(sampled, plan).choose()
        few = layout is not None and len(sampled.spool) < EARLY * layout.sweeps and layout.sweeps > 1
        return None if few and self._packs.options.reads == "auto" else layout

    def _work(self, sampled: SampledAhead[Any], plan: PackPlan) -> Work:
        return Work(
            spool=sampled.spool,
            tables=self._packs.tables,
            counts=sampled.counts,
            plan=plan,
            rates=self._packs.rates(),
            scratch_bytes=self.room_bytes(sampled),
            consumer_s=self._learned.consumer_s * len(sampled.spool),
            parts=self._packs.device is None,
        )

    def _budget(self, sampled: SampledAhead[Any], memory_bytes: int) -> PackBudget:
        waiting = self._loader.waiting_batches
        device = self._packs.device
        return PackBudget(
            tables=self._packs.tables,
            output_row_bytes={t.name: out_row_bytes(t, self._packs.dtype) for t in self._packs.tables},
            bounce_bytes=self._packs.engine.bounce_bytes,
            sampler_bytes=_room(self._epoch.source_bytes(waiting)),
            waiting=waiting,
            memory_bytes=memory_bytes,
            disks=self._packs.disk_count,
            device_bytes=None if device is None else device.memory_bytes,
        )

    def _needed(self, sampled: SampledAhead[Any], memory_bytes: int, overlap: bool) -> dict[str, int]:
        """Bytes by purpose, without packs."""
        budget = self._budget(sampled, memory_bytes)
        return budget.needed(_room_rows(sampled), _room(sampled.minibatch_bytes), overlap)

    def _plan(self, sampled: SampledAhead[Any], memory_bytes: int, overlap: bool) -> PackPlan | None:
        budget = self._budget(sampled, memory_bytes)
        return budget.share(_room_rows(sampled), _room(sampled.minibatch_bytes), overlap)

    def _advise(self, sampled: SampledAhead[Any], memory_bytes: int, times: float) -> None:
        """Warn that packs do not fit, and say what memory they need and what they would save."""
        random_s, rates = times * self.random_s(sampled), self._packs.rates()
        memory = self._loader.source.memory
        nbytes = times * sum(
            t.row_bytes * sum(i * n for i, n in enumerate(counts.histogram()))
            for t, counts in zip(self._packs.tables, sampled.counts, strict=True)
        )
        packed_s = self.sweep_s(sampled) + nbytes / rates.write_bytes_per_s + rates.packed_s(nbytes)
        if not _pays(packed_s, random_s):
            return
        enough = self._enough(sampled, memory_bytes)
        features_bytes = sum(t.page_count * t.page_bytes for t in self._packs.tables)
        # With as much memory as all features take, they would not be read by packs.
        pays = self._packs.device is not None or enough < features_bytes
        log.log(
            logging.WARNING if pays else logging.INFO,
            "memory=%d (%s) is too small for packs, so rows are read at random%s: with %s packs would take "
            "about %.0f s",
            memory,
            format_bytes(memory),
            f", in about {random_s:.0f} s" if math.isfinite(random_s) else "",
            _advice(enough),
            packed_s,
        )

    def _enough(self, sampled: SampledAhead[Any], memory_bytes: int) -> int:
        """The memory that packs of minibatches like these need; 0: no host memory is enough.

        memory_bytes: too little.
        """

        def fits(nbytes: int) -> bool:
            return self._layout(sampled, nbytes, False) is not None

        others_bytes = self._loader.source.memory - memory_bytes
        least = least_memory(memory_bytes, fits)
        return _room(least) + others_bytes if least else 0

    def _too_little(self, sampled: SampledAhead[Any], memory_bytes: int) -> str:
        largest = sum(sampled.rows[t.name] * t.row_bytes for t in self._packs.tables)
        purposes, memory = self._needed(sampled, memory_bytes, False), self._loader.source.memory
        if memory > memory_bytes:
            purposes[OTHERS] = memory - memory_bytes
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        there = ""
        if self._packs.device is not None:
            n = self._packs.device.memory_bytes
            there = f", or device_memory={n} ({format_bytes(n)}),"
        return (
            f"memory={memory} ({format_bytes(memory)}){there} is too small for reads="
            f"{self._packs.options.reads!r}: {listing} + two packs of {format_bytes(largest)} do not fit. "
            f"Give {_advice(self._enough(sampled, memory_bytes))} to gids.open(), use smaller minibatches, "
            "or reads='random'."
        )


def _pays(packed_s: float, random_s: float) -> bool:
    """Whether packs save enough time."""
    return random_s - packed_s >= _WORTH_S


def _advice(enough_bytes: int) -> str:
    """enough_bytes: of host memory, 0 if device memory or scratch lacks."""
    return (
        f"memory={advised_bytes(enough_bytes)}" if enough_bytes else "more device_memory= or scratch_bytes="
    )


def _room(count: int) -> int:
    return count + count // _MARGIN


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
