"""Cuts: which rows stay resident, how minibatches fall into packs, and what that costs.

Called with a sampled superbatch. Tries several shares of resident rows and takes the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

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


@dataclass(frozen=True)
class Candidate:
    """One share of resident rows. hot: (above, before) of each space, as native/packs/counts.h has them.

    resident_rows: of each space. half_bytes: memory of one pack. packs: (minibatch after its last, rows of
    each space) of each.
    """

    hot: tuple[tuple[int, int], ...]
    resident_rows: tuple[int, ...]
    half_bytes: int
    packs: tuple[tuple[int, tuple[int, ...]], ...]

    def packed_bytes(self, spaces: Sequence[Space]) -> int:
        return sum(
            n * space.row_bytes for _, rows in self.packs for n, space in zip(rows, spaces, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """The cheapest candidate of a way, and its predicted seconds for all spooled minibatches."""

    way: Way
    candidate: Candidate
    predicted_s: float


def sweep_bytes(spaces: Sequence[Space], wanted: Sequence[int], rates: DiskRates) -> int:
    """Bytes that a sweep for so many rows of each space reads, about."""
    total = 0
    for space, rows in zip(spaces, wanted, strict=True):
        for t in space.tables:
            total += min(t.page_count * t.page_bytes, rows * (t.page_bytes + rates.gap_bytes))
    return total


def choose_layout(
    spool: Spool,
    spaces: Sequence[Space],
    counts: Sequence[Any],
    plan: PackPlan,
    rates: DiskRates,
    ways: Sequence[Way],
    *,
    scratch_bytes: int,
    consumer_s: float = 0.0,
) -> dict[Way, Layout]:
    """The cheapest layout of each way; a way is left out if a minibatch does not fit in a pack.

    counts: _core.Counts of each space over the spooled minibatches. scratch_bytes: room for packs.
    consumer_s: seconds that the consumer takes for all of them.
    """
    found: dict[Way, tuple[float, _Trial]] = {}
    wanted = [s.row_count - int(c.histogram()[0]) for s, c in zip(spaces, counts, strict=True)]
    one_sweep_s = sweep_bytes(spaces, wanted, rates) / rates.read_bytes_per_s

    def seconds(way: Way, candidate: Candidate, times: float) -> float:
        packed, packs = times * candidate.packed_bytes(spaces), times * len(candidate.packs)
        if way == "sweep":
            return max(packs * one_sweep_s, consumer_s)
        sweeps = max(1, math.ceil(packs / plan.most_packs), math.ceil(packed / max(1, scratch_bytes)))
        reading_s = max(packed / rates.read_bytes_per_s, consumer_s)
        return sweeps * one_sweep_s + packed / rates.write_bytes_per_s + reading_s

    if not rates.write_bytes_per_s:
        ways = [way for way in ways if way != "pack"]
    tried = min(len(spool), _TRIED)
    trials = _trials(spaces, counts, plan)
    for trial in _cut(trials, spool, tried):
        for way in ways:
            about_s = seconds(way, trial.candidate(), len(spool) / tried)
            if way not in found or about_s < found[way][0]:
                found[way] = (about_s, trial)
    if tried == len(spool):
        return {way: Layout(way, trial.candidate(), about_s) for way, (about_s, trial) in found.items()}
    # The best of them again, on all minibatches. One that is larger than those before may not fit: then all.
    again = {way: trial.again() for way, (_, trial) in found.items()}
    if set(_cut(list(again.values()), spool, len(spool))) == set(again.values()):
        return {
            way: Layout(way, of.candidate(), seconds(way, of.candidate(), 1)) for way, of in again.items()
        }
    candidates = [trial.candidate() for trial in _cut([t.again() for t in trials], spool, len(spool))]
    return {
        way: min(
            (Layout(way, of, seconds(way, of, 1)) for of in candidates), key=lambda layout: layout.predicted_s
        )
        for way in ways
        if candidates
    }


@dataclass(frozen=True, eq=False)
class _Trial:
    """A cut in progress."""

    cutter: _core.Cutter
    spaces: list[tuple[_core.Counts, int, int, int]]
    resident_rows: tuple[int, ...]
    most_bytes: int
    half_bytes: int

    def candidate(self) -> Candidate:
        hot = tuple((above, before) for _, _, above, before in self.spaces)
        packs = tuple((end, tuple(rows)) for end, rows in self.cutter.packs())
        return Candidate(hot, self.resident_rows, self.half_bytes, packs)

    def again(self) -> _Trial:
        return replace(self, cutter=_core.Cutter(self.spaces, self.most_bytes))


def _trials(spaces: Sequence[Space], counts: Sequence[Any], plan: PackPlan) -> list[_Trial]:
    padding = ALIGNMENT * sum(len(space.tables) for space in spaces)
    histograms = [of.histogram() for of in counts]
    found: list[_Trial] = []
    for share in _SHARES:
        rows = tuple(_hottest(histograms, spaces, int(share * plan.pack_bytes)))
        resident = sum(n * space.row_bytes for n, space in zip(rows, spaces, strict=True))
        most = (plan.pack_bytes - resident - padding) // 2 - padding
        if most <= 0 or any(rows == other.resident_rows for other in found):
            continue
        of = [(c, s.row_bytes, *c.hottest(n)) for c, s, n in zip(counts, spaces, rows, strict=True)]
        found.append(_Trial(_core.Cutter(of, most), of, rows, most, most + padding))
    return found


def _cut(trials: Sequence[_Trial], spool: Spool, minibatches: int) -> list[_Trial]:
    """Cut the first minibatches; returns the trials in whose packs all of them fit."""
    with ThreadPoolExecutor(max(1, len(trials)), "gids-cut") as threads:
        for i in range(minibatches):
            rows = spool.rows(i)
            list(threads.map(lambda trial, of=rows: trial.cutter.add(of), trials))
    return [trial for trial in trials if trial.cutter.largest_bytes <= trial.most_bytes]


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
