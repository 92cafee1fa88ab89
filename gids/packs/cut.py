"""Cuts: which rows stay resident, how minibatches fall into packs, and what that costs.

Called with a sampled superbatch. Tries several shares of resident rows and takes the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from gids import _core
from gids.packs.costs import DiskRates
from gids.packs.memory import ALIGNMENT, PackPlan
from gids.packs.spaces import Space
from gids.packs.spool import Spool

if TYPE_CHECKING:
    from gids.store import Table

Way = Literal["sweep", "pack", "mixed"]
"""Mixed: by sweeps for some tables, from scratch for the others."""

_TRIED = 16
"""Minibatches that each share is tried on; only the best one is tried on all."""

_FAR_SLOWER = 8.0
"""A way whose best trial takes so many times as long as another way's is not cut whole."""

_SHARES = (0.0, 0.4, 0.8, 0.2, 0.6, 0.9, 0.7)
"""Shares of the memory for packs that are tried for resident rows; the first ones if memory is short."""


@dataclass(frozen=True, eq=False)
class Resident:
    """How the memory for packs is used. rows: that stay in memory, a set of each space.

    pack_bytes: of one pack; there are two. lists_bytes: of the row lists of a superbatch.
    """

    rows: tuple[_core.RowSet, ...]
    pack_bytes: int
    lists_bytes: int


@dataclass(frozen=True)
class Layout:
    """The cheapest cut for a way of reading, and its predicted seconds for all spooled minibatches.

    swept: tables that are read by a sweep for each pack. packs: (minibatch after its last one, rows of each
    space) of each. lists: row lists of each space, by pack, of the first packs; superbatches take them.
    """

    way: Way
    swept: frozenset[str]
    resident: Resident
    packs: tuple[tuple[int, tuple[int, ...]], ...]
    predicted_s: float
    lists: dict[int, list[_core.RowList]] = field(default_factory=dict)


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
        """The cheapest layout for each way; a way is left out if a minibatch does not fit in a pack, and
        "mixed" if all tables are read best in the same way.

        resident: the rows that must stay. None: those of the cheapest share.
        """
        if not self.rates.write_bytes_per_s:
            ways = [way for way in ways if way == "sweep"]
        trials = [self._trial(resident)] if resident is not None else self._trials()
        tried = min(len(self.spool), _TRIED)
        self._cut(trials, tried)
        fitting, whole = [trial for trial in trials if trial.fits], list[_Trial]()
        while fitting:
            best = self._promising(ways, fitting, len(self.spool) / max(1, tried))
            whole = [self._trial(of.resident, lists=True) for of in best]
            self._cut(whole, len(self.spool))
            small = [of for of, trial in zip(best, whole, strict=True) if not trial.fits]
            if not small:
                break
            # A later minibatch is larger than the first ones.
            fitting, whole = [trial for trial in fitting if trial not in small], []
        lists = {trial: dict(enumerate(trial.cutter.take_lists())) for trial in whole}
        found: dict[Way, Layout] = {}
        for way, (seconds, swept, trial) in self._best(ways, whole, 1).items():
            found[way] = Layout(way, swept, trial.resident, trial.packs(), seconds, lists[trial])
        return found

    def _promising(self, ways: Sequence[Way], trials: Sequence[_Trial], times: float) -> list[_Trial]:
        """The best trial for each way, without ways that are far slower than another one."""
        best = self._best(ways, trials, times).values()
        most = _FAR_SLOWER * min((seconds for seconds, _, _ in best), default=0.0)
        return list(dict.fromkeys(trial for seconds, _, trial in best if seconds <= most))

    @cached_property
    def _histograms(self) -> list[list[int]]:
        return [of.histogram() for of in self.counts]

    @cached_property
    def _wanted(self) -> list[int]:
        """Rows of each space that any minibatch wants."""
        return [space.row_count - of[0] for of, space in zip(self._histograms, self.spaces, strict=True)]

    def _price(self, way: Way, trial: _Trial, times: float) -> tuple[float, frozenset[str]] | None:
        """Predicted seconds for `times` as many minibatches as were cut, and the tables that are swept.

        None for "mixed" if no table, or every table, is better swept.
        """
        rates, cut = self.rates, trial.packs()
        packed = [times * sum(rows) for rows in zip(*(rows for _, rows in cut), strict=True)]
        sweeps = self._sweeps(trial, packed, times)
        first_s = next_s = written = 0.0  # before the first pack is in memory, and later
        swept = set()
        for s, space in enumerate(self.spaces):
            for t in space.tables:
                resident_s = _table_seconds(t, len(trial.resident.rows[s]), rates)
                packs_s = times * sum(_table_seconds(t, rows[s], rates) for _, rows in cut)
                once_s = _table_seconds(t, self._wanted[s], rates)
                nbytes = packed[s] * t.row_bytes
                kept_s = nbytes / max(1.0, rates.write_bytes_per_s) + nbytes / rates.read_bytes_per_s
                if way == "sweep" or (way == "mixed" and resident_s + packs_s < once_s + kept_s):
                    swept.add(t.name)
                    first_s += resident_s
                    next_s += packs_s
                else:
                    first_s += sweeps * once_s
                    written += nbytes
        if way == "mixed" and not (swept and written):
            return None
        first_s += written / max(1.0, rates.write_bytes_per_s)
        next_s += (written + self.spool.bytes_written) / rates.read_bytes_per_s
        return first_s + max(next_s, self.consumer_s), frozenset(swept)

    def _sweeps(self, trial: _Trial, packed: Sequence[float], times: float) -> int:
        """Sweeps to scratch for all packs, which have so many rows of each space."""
        cut = trial.packs()
        nbytes = sum(n * space.row_bytes for n, space in zip(packed, self.spaces, strict=True))
        lists = sum(
            n * _list_row_bytes(n / times / max(1, len(cut)) / max(1, space.row_count))
            for n, space in zip(packed, self.spaces, strict=True)
        )
        most_packs = self.plan.most_packs(self.plan.write_bytes(trial.resident.pack_bytes))
        return max(
            1,
            math.ceil(times * len(cut) / most_packs),
            math.ceil(nbytes / max(1, self.scratch_bytes)),
            math.ceil(lists / max(1, trial.resident.lists_bytes)),
        )

    def _best(
        self, ways: Sequence[Way], trials: Sequence[_Trial], times: float
    ) -> dict[Way, tuple[float, frozenset[str], _Trial]]:
        """The cheapest trial for each way that is possible: its seconds, and the tables that are swept."""
        found: dict[Way, tuple[float, frozenset[str], _Trial]] = {}
        for way in ways:
            for trial in trials:
                price = self._price(way, trial, times)
                if price is not None and (way not in found or price[0] < found[way][0]):
                    found[way] = (*price, trial)
        return found

    @property
    def _padding(self) -> int:
        """Bytes by which the alignment of a pack's parts may add up."""
        return ALIGNMENT * sum(len(space.tables) for space in self.spaces)

    def _trial(self, resident: Resident, *, lists: bool = False) -> _Trial:
        of = [(rows, space.row_bytes) for rows, space in zip(resident.rows, self.spaces, strict=True)]
        most_bytes = resident.pack_bytes - self._padding
        lists_bytes = resident.lists_bytes if lists else 0
        return _Trial(_core.Cutter(of, most_bytes, lists_bytes=lists_bytes), resident, most_bytes)

    def _trials(self) -> list[_Trial]:
        found: dict[tuple[int, ...], _Trial] = {}
        for share in _SHARES[: self.plan.trials]:
            rows, packed = hottest_rows(self._histograms, self.spaces, int(share * self.plan.pack_bytes))
            held = sum(n * space.row_bytes for n, space in zip(rows, self.spaces, strict=True))
            lists = sum(
                n * _list_row_bytes(n / max(1, len(self.spool)) / max(1, space.row_count))
                for n, space in zip(packed, self.spaces, strict=True)
            )
            lists_bytes = self.plan.lists_bytes(int(lists))
            left = self.plan.rows_bytes(lists_bytes) - held
            pack_bytes = (left - self._padding) // 2 // ALIGNMENT * ALIGNMENT
            if pack_bytes > self._padding and tuple(rows) not in found:
                sets = tuple(of.hottest(n) for of, n in zip(self.counts, rows, strict=True))
                found[tuple(rows)] = self._trial(Resident(sets, pack_bytes, lists_bytes))
        return list(found.values())

    def _cut(self, trials: Sequence[_Trial], count: int) -> None:
        """Add the first minibatches to the cuts."""
        if not trials:
            return
        with ThreadPoolExecutor(len(trials), "gids-cut") as threads:
            for rows in self.spool.rows_of(range(count)):
                list(threads.map(lambda trial, of=rows: trial.cutter.add(of), trials))


@dataclass(frozen=True, eq=False)
class _Trial:
    """A cut in progress. most_bytes: of the rows of one pack."""

    cutter: _core.Cutter
    resident: Resident
    most_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every minibatch fits in a pack."""
        return self.cutter.largest_bytes <= self.most_bytes

    def packs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((end, tuple(rows)) for end, rows in self.cutter.packs())


def sweep_seconds(spaces: Sequence[Space], rows: Sequence[int], rates: DiskRates) -> float:
    """Of one sweep for so many rows of each space, about."""
    pairs = zip(rows, spaces, strict=True)
    return sum(_table_seconds(t, wanted, rates) for wanted, space in pairs for t in space.tables)


def _table_seconds(table: Table, rows: int, rates: DiskRates) -> float:
    """Of one sweep for so many rows of a table, about."""
    nbytes = min(table.page_count * table.page_bytes, rows * (table.page_bytes + rates.gap_bytes))
    return float(nbytes / rates.read_bytes_per_s)


def _list_row_bytes(density: float) -> float:
    """Bytes of a row in the row list of a pack that has this share of a table's rows."""
    return 1.0 + (1 - min(1.0, density)) ** 128 + (1 - min(1.0, density)) ** 16384


def hottest_rows(
    histograms: Sequence[Sequence[int]], spaces: Sequence[Space], nbytes: int
) -> tuple[list[int], list[int]]:
    """Rows of each space, the most wanted of all, that fit in nbytes; and how often the others are wanted.

    histograms: rows of each space that 0, 1, 2, … minibatches want.
    """
    rows = [0] * len(spaces)
    others = [sum(count * n for count, n in enumerate(histogram)) for histogram in histograms]
    for count in range(max(map(len, histograms)) - 1, 0, -1):
        for i, (histogram, space) in enumerate(zip(histograms, spaces, strict=True)):
            here = histogram[count] if count < len(histogram) else 0
            fit = min(here, nbytes // space.row_bytes)
            rows[i] += fit
            others[i] -= fit * count
            nbytes -= fit * space.row_bytes
            if fit < here:
                return rows, others
    return rows, others
