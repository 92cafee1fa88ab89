"""Cuts: which rows stay resident, how minibatches fall into packs, and what that costs.

Called with a sampled superbatch. Tries several shares of resident rows and takes the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from gids import _core
from gids.packs.costs import DiskRates
from gids.packs.memory import ALIGNMENT, PackPlan
from gids.packs.spaces import Space
from gids.packs.spool import Spool

Way = Literal["sweep", "pack"]

_TRIED = 32
"""Minibatches that each share is tried on; only the best one is tried on all."""

_SHARES = (0.0, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9)
"""Shares of the memory for packs that are tried for resident rows."""


@dataclass(frozen=True, eq=False)
class Resident:
    """Rows that stay in memory, and the memory of one pack beside them. rows: a set of each space."""

    rows: tuple[_core.RowSet, ...]
    pack_bytes: int


@dataclass(frozen=True)
class Layout:
    """The cheapest cut for a way of reading, and its predicted seconds for all spooled minibatches.

    packs: (minibatch after its last one, rows of each space) of each.
    """

    way: Way
    resident: Resident
    packs: tuple[tuple[int, tuple[int, ...]], ...]
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be cut. counts: of each space over the spooled minibatches.

    scratch_bytes: room for packs. consumer_s: seconds that the consumer takes for all minibatches.
    """

    spool: Spool
    spaces: Sequence[Space]
    counts: Sequence[_core.Counts]
    plan: PackPlan
    rates: DiskRates
    scratch_bytes: int
    consumer_s: float = 0.0

    def choose(self, ways: Sequence[Way], resident: Resident | None = None) -> dict[Way, Layout]:
        """The cheapest layout for each way; a way is left out if a minibatch does not fit in a pack.

        resident: the rows that must stay. None: those of the cheapest share.
        """
        if not self.rates.write_bytes_per_s:
            ways = [way for way in ways if way != "pack"]
        trials = [self._trial(resident)] if resident is not None else self._trials()
        tried = min(len(self.spool), _TRIED)
        if len(trials) > 1 and tried < len(self.spool):
            times = len(self.spool) / tried
            fitting = self._cut(trials, tried)
            best = {self._best(way, fitting, times) for way in ways if fitting}
            # A later minibatch may be larger than those before, and not fit: then all are tried on all.
            again = self._cut([replace(t, cutter=self._cutter(t.resident)) for t in best], len(self.spool))
            fitting = again
            if not again or len(again) < len(best):
                fitting = self._cut(self._trials(), len(self.spool))
        else:
            fitting = self._cut(trials, len(self.spool))
        found: dict[Way, Layout] = {}
        for way in ways if fitting else ():
            trial = self._best(way, fitting, 1)
            found[way] = Layout(way, trial.resident, trial.packs(), self._seconds(way, trial, 1))
        return found

    def _seconds(self, way: Way, trial: _Trial, times: float) -> float:
        """Predicted seconds for `times` as many minibatches as the trial has cut."""
        cut = trial.packs()
        packs = times * len(cut)
        one_sweep_s = sweep_bytes(self.spaces, self.counts, self.rates) / self.rates.read_bytes_per_s
        if way == "sweep":
            return max(packs * one_sweep_s, self.consumer_s)
        packed = times * sum(
            n * space.row_bytes for _, rows in cut for n, space in zip(rows, self.spaces, strict=True)
        )
        sweeps = max(
            1, math.ceil(packs / self.plan.most_packs), math.ceil(packed / max(1, self.scratch_bytes))
        )
        reading_s = max(packed / self.rates.read_bytes_per_s, self.consumer_s)
        return sweeps * one_sweep_s + packed / self.rates.write_bytes_per_s + reading_s

    def _best(self, way: Way, trials: Sequence[_Trial], times: float) -> _Trial:
        return min(trials, key=lambda trial: self._seconds(way, trial, times))

    def _cutter(self, resident: Resident) -> _core.Cutter:
        of = [(rows, space.row_bytes) for rows, space in zip(resident.rows, self.spaces, strict=True)]
        return _core.Cutter(of, resident.pack_bytes - self._padding)

    @property
    def _padding(self) -> int:
        """Bytes by which the alignment of a pack's parts may add up."""
        return ALIGNMENT * sum(len(space.tables) for space in self.spaces)

    def _trial(self, resident: Resident) -> _Trial:
        return _Trial(self._cutter(resident), resident, resident.pack_bytes - self._padding)

    def _trials(self) -> list[_Trial]:
        histograms = [of.histogram() for of in self.counts]
        found: dict[tuple[int, ...], _Trial] = {}
        for share in _SHARES:
            rows = tuple(_hottest(histograms, self.spaces, int(share * self.plan.pack_bytes)))
            held = sum(n * space.row_bytes for n, space in zip(rows, self.spaces, strict=True))
            pack_bytes = (self.plan.pack_bytes - held - self._padding) // 2 // ALIGNMENT * ALIGNMENT
            if pack_bytes > self._padding and rows not in found:
                sets = tuple(of.hottest(n) for of, n in zip(self.counts, rows, strict=True))
                found[rows] = self._trial(Resident(sets, pack_bytes))
        return list(found.values())

    def _cut(self, trials: Sequence[_Trial], minibatches: int) -> list[_Trial]:
        """Cut the first minibatches; returns the trials in whose packs all of them fit."""
        with ThreadPoolExecutor(max(1, len(trials)), "gids-cut") as threads:
            for i in range(minibatches):
                rows = self.spool.rows(i)
                list(threads.map(lambda trial, of=rows: trial.cutter.add(of), trials))
        return [trial for trial in trials if trial.cutter.largest_bytes <= trial.most_bytes]


@dataclass(frozen=True, eq=False)
class _Trial:
    """A cut in progress. most_bytes: of the rows of one pack."""

    cutter: _core.Cutter
    resident: Resident
    most_bytes: int

    def packs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((end, tuple(rows)) for end, rows in self.cutter.packs())


def sweep_bytes(spaces: Sequence[Space], counts: Sequence[_core.Counts], rates: DiskRates) -> int:
    """Bytes that a sweep for all wanted rows reads, about."""
    total = 0
    for space, of in zip(spaces, counts, strict=True):
        wanted = space.row_count - of.histogram()[0]
        for t in space.tables:
            total += min(t.page_count * t.page_bytes, wanted * (t.page_bytes + rates.gap_bytes))
    return total


def _hottest(histograms: Sequence[Sequence[int]], spaces: Sequence[Space], nbytes: int) -> list[int]:
    """Rows of each space, the most wanted ones of all, that fit in nbytes."""
    rows = [0] * len(spaces)
    for count in range(max(map(len, histograms)) - 1, 0, -1):
        for i, (histogram, space) in enumerate(zip(histograms, spaces, strict=True)):
            here = histogram[count] if count < len(histogram) else 0
            fit = min(here, nbytes // space.row_bytes)
            rows[i] += fit
            nbytes -= fit * space.row_bytes
            if fit < here:
                return rows
    return rows
