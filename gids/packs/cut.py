"""Cuts: which rows stay resident, how minibatches fall into packs, and what that costs.

Called with a sampled superbatch. Tries several shares of resident rows and takes the cheapest.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from gids import _core
from gids.packs.costs import DiskRates
from gids.packs.memory import ALIGNMENT, PackPlan
from gids.packs.spaces import Space
from gids.packs.spool import Spool

Way = Literal["sweep", "pack"]

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
    found: dict[Way, Layout] = {}
    wanted = [s.row_count - int(c.histogram()[0]) for s, c in zip(spaces, counts, strict=True)]
    one_sweep_s = sweep_bytes(spaces, wanted, rates) / rates.read_bytes_per_s
    for candidate in _candidates(spool, spaces, counts, plan):
        packed = candidate.packed_bytes(spaces)
        for way in ways:
            if way == "pack":
                if not rates.write_bytes_per_s:
                    continue
                pieces = max(-(-len(candidate.packs) // plan.most_packs), -(-packed // max(1, scratch_bytes)))
                seconds = pieces * one_sweep_s + packed / rates.write_bytes_per_s
                seconds += max(packed / rates.read_bytes_per_s, consumer_s)
            else:
                seconds = max(len(candidate.packs) * one_sweep_s, consumer_s)
            if way not in found or seconds < found[way].predicted_s:
                found[way] = Layout(way, candidate, seconds)
    return found


def _candidates(
    spool: Spool, spaces: Sequence[Space], counts: Sequence[Any], plan: PackPlan
) -> list[Candidate]:
    padding = ALIGNMENT * sum(len(space.tables) for space in spaces)
    histograms = [of.histogram() for of in counts]
    tried: list[tuple[list[int], tuple[tuple[int, int], ...], int, _core.Cutter]] = []
    for share in _SHARES:
        rows = _hottest(histograms, spaces, int(share * plan.pack_bytes))
        resident = sum(n * space.row_bytes for n, space in zip(rows, spaces, strict=True))
        half = (plan.pack_bytes - resident - padding) // 2 - padding
        if half <= 0 or any(rows == other for other, *_ in tried):
            continue
        hot = tuple(of.hottest(n) for of, n in zip(counts, rows, strict=True))
        cutter = _core.Cutter(
            [(of, s.row_bytes, *h) for of, s, h in zip(counts, spaces, hot, strict=True)], half
        )
        tried.append((rows, hot, half, cutter))
    with ThreadPoolExecutor(max(1, len(tried)), "gids-cut") as threads:
        for i in range(len(spool)):
            minibatch = spool.rows(i)
            list(threads.map(lambda t, of=minibatch: t[3].add(of), tried))
    return [
        Candidate(hot, tuple(rows), half + padding, tuple((end, tuple(n)) for end, n in cutter.packs()))
        for rows, hot, half, cutter in tried
        if cutter.largest_bytes <= half
    ]


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
