"""Cuts: which rows stay resident, how minibatches fall into packs, and what that costs.

Called with a sampled superbatch. Tries several shares of resident rows and takes the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gids import _core
from gids.closing import Threads
from gids.packs.costs import DiskRates
from gids.packs.memory import ALIGNMENT, PackPlan
from gids.packs.spool import Spool
from gids.store import Table

_TRIED = 16
"""Minibatches that each share is tried on; only the best one is tried on all."""

_SHARES = (0.0, 0.4, 0.8, 0.2, 0.6, 0.9, 0.7)
"""Shares of the memory for packs that are tried for resident rows; the first ones if memory is short."""


LEAST_PART_BYTES = 64 << 10
"""Of packs with parts of a minibatch. Shorter reads would be little better than random ones."""


@dataclass(frozen=True, eq=False)
class Resident:
    """How the memory for packs is used. rows: that stay in memory, a set of each table.

    pack_bytes: of one pack; there are two. lists_bytes: of the row lists of a superbatch.
    """

    rows: tuple[_core.RowSet, ...]
    pack_bytes: int
    lists_bytes: int


@dataclass(frozen=True)
class Layout:
    """A cut, and its predicted seconds and sweeps for all spooled minibatches.

    packs: (minibatch after its last one, rows of each table) of each; packs with the same end are parts of
    one minibatch. lists: row lists of each table, by pack, of the first packs; superbatches take them.
    """

    resident: Resident
    packs: tuple[tuple[int, tuple[int, ...]], ...]
    predicted_s: float
    sweeps: int
    lists: dict[int, list[_core.RowList]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be cut. counts: of each table over the spooled minibatches.

    scratch_bytes: room for packs. consumer_s: seconds that the consumer takes for all minibatches. parts: a
    minibatch that does not fit in a pack may be cut into several.
    """

    spool: Spool
    tables: Sequence[Table]
    counts: Sequence[_core.Counts]
    plan: PackPlan
    rates: DiskRates
    scratch_bytes: int
    consumer_s: float = 0.0
    parts: bool = True

    def choose(self, resident: Resident | None = None) -> Layout | None:
        """The cheapest layout; None if a minibatch does not fit in a pack.

        resident: the rows that must stay. None: those of the cheapest share.
        """
        trials = [self._trial(resident)] if resident is not None else self._trials()
        tried = min(len(self.spool), _TRIED)
        self._cut(trials, tried)
        trials = [trial for trial in trials if trial.fits]
        while trials:
            best = min(trials, key=lambda trial: self._price(trial, len(self.spool) / max(1, tried)))
            whole = self._trial(best.resident, lists=True)
            self._cut([whole], len(self.spool))
            if whole.fits:
                lists = dict(enumerate(whole.cutter.take_lists()))
                sweeps = self._sweeps(whole, 1)
                return Layout(whole.resident, whole.packs(), self._price(whole, 1), sweeps, lists)
            trials.remove(best)  # a later minibatch is larger than the first ones
        return None

    @cached_property
    def _histograms(self) -> list[list[int]]:
        return [counts.histogram() for counts in self.counts]

    @cached_property
    def _wanted(self) -> list[int]:
        """Rows of each table that any minibatch wants."""
        return [table.row_count - rows[0] for rows, table in zip(self._histograms, self.tables, strict=True)]

    def _price(self, trial: _Trial, times: float) -> float:
        """Predicted seconds for `times` as many minibatches as were cut."""
        rates, cut = self.rates, trial.packs()
        packed_bytes = self._nbytes(trial.packed(times))
        sweep_s = self._sweeps(trial, times) * sweep_seconds(self.tables, self._wanted, rates)
        write_s = packed_bytes / max(1.0, rates.write_bytes_per_s)
        read_s = rates.packed_s(packed_bytes + self.spool.bytes_written)
        # Two packs are read while others are trained; the other parts of a minibatch when it is due.
        ahead_bytes = 2 * trial.most_bytes * times * len({end for end, _ in cut})
        late = 1 - min(1.0, ahead_bytes / max(1, packed_bytes))
        return float(sweep_s + write_s + max(read_s, self.consumer_s) + late * min(read_s, self.consumer_s))

    def _sweeps(self, trial: _Trial, times: float) -> int:
        """Sweeps to scratch for `times` as many minibatches as were cut."""
        cut, packed = trial.packs(), trial.packed(times)
        nbytes = self._nbytes(packed)
        lists = self._lists_bytes(packed, times * len(cut))
        consumer_bytes = self.plan.purposes["outputs"] // 2  # beside all sweeps but the first
        write_bytes = self.plan.write_bytes(trial.resident.pack_bytes, consumer_bytes)
        most_packs = self.plan.most_packs(write_bytes)
        return max(
            1,
            math.ceil(times * len(cut) / most_packs),
            math.ceil(nbytes / max(1, self.scratch_bytes)),
            math.ceil(lists / max(1, trial.resident.lists_bytes)),
        )

    def _nbytes(self, rows: Sequence[float]) -> float:
        """Of so many rows of each table."""
        return sum(n * table.row_bytes for n, table in zip(rows, self.tables, strict=True))

    def _lists_bytes(self, rows: Sequence[float], packs: float) -> float:
        """Of the row lists of so many packs, which have so many rows of each table together."""
        return sum(
            n * _list_row_bytes(n / max(1, packs) / max(1, table.row_count))
            for n, table in zip(rows, self.tables, strict=True)
        )

    @property
    def _padding(self) -> int:
        """Bytes by which the alignment of a pack's parts may add up."""
        return ALIGNMENT * len(self.tables)

    def _trial(self, resident: Resident, *, lists: bool = False) -> _Trial:
        tables = [(rows, table.row_bytes) for rows, table in zip(resident.rows, self.tables, strict=True)]
        most_bytes = resident.pack_bytes - self._padding
        lists_bytes = resident.lists_bytes if lists else 0
        parts = self.parts and most_bytes >= LEAST_PART_BYTES
        cutter = _core.Cutter(tables, most_bytes, lists_bytes=lists_bytes, parts=parts)
        most_parts = self.plan.most_packs(self.plan.write_bytes(resident.pack_bytes)) if parts else 1
        return _Trial(cutter, resident, most_bytes, most_parts)

    def _trials(self) -> list[_Trial]:
        trials: dict[tuple[int, ...], _Trial] = {}
        for share in _SHARES[: self.plan.trials]:
            rows, packed = hottest_rows(self._histograms, self.tables, int(share * self.plan.pack_bytes))
            lists_bytes = self.plan.lists_bytes(int(self._lists_bytes(packed, len(self.spool))))
            left = self.plan.rows_bytes(lists_bytes) - int(self._nbytes(rows))
            pack_bytes = (left - self._padding) // 2 // ALIGNMENT * ALIGNMENT
            if pack_bytes > self._padding and tuple(rows) not in trials:
                sets = tuple(counts.hottest(n) for counts, n in zip(self.counts, rows, strict=True))
                trials[tuple(rows)] = self._trial(Resident(sets, pack_bytes, lists_bytes))
        return list(trials.values())

    def _cut(self, trials: Sequence[_Trial], count: int) -> None:
        """Add the first minibatches to the cuts."""
        if not trials:
            return
        with Threads(len(trials), "gids-cut") as threads:
            for rows in self.spool.rows_of(range(count)):
                list(threads.map(lambda trial, rows=rows: trial.cutter.add(rows), trials))


@dataclass(frozen=True, eq=False)
class _Trial:
    """A cut in progress. most_bytes: of the rows of one pack. most_parts: packs that a minibatch may need."""

    cutter: _core.Cutter
    resident: Resident
    most_bytes: int
    most_parts: int

    @property
    def fits(self) -> bool:
        """Whether every minibatch fits in so many packs."""
        return self.cutter.largest_bytes <= self.most_parts * self.most_bytes

    def packs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((end, tuple(rows)) for end, rows in self.cutter.packs())

    def packed(self, times: float) -> list[float]:
        """Rows of each table in the packs of `times` as many minibatches."""
        return [times * sum(rows) for rows in zip(*(rows for _, rows in self.packs()), strict=True)]


def sweep_seconds(tables: Sequence[Table], rows: Sequence[int], rates: DiskRates) -> float:
    """Of one sweep for so many rows of each table, about."""
    return sum(
        min(t.page_count * t.page_bytes, wanted * (t.page_bytes + rates.gap_bytes)) / rates.read_bytes_per_s
        for wanted, t in zip(rows, tables, strict=True)
    )


def _list_row_bytes(density: float) -> float:
    """Bytes of a row in the row list of a pack that has this share of a table's rows."""
    return 1.0 + (1 - min(1.0, density)) ** 128 + (1 - min(1.0, density)) ** 16384


def hottest_rows(
    histograms: Sequence[Sequence[int]], tables: Sequence[Table], nbytes: int
) -> tuple[list[int], list[int]]:
    """Rows of each table, the most wanted of all, that fit in nbytes; and how often the others are wanted.

    histograms: rows of each table that 0, 1, 2, … minibatches want.
    """
    rows = [0] * len(tables)
    others = [sum(count * n for count, n in enumerate(histogram)) for histogram in histograms]
    for count in range(max(map(len, histograms)) - 1, 0, -1):
        for i, (histogram, table) in enumerate(zip(histograms, tables, strict=True)):
            here = histogram[count] if count < len(histogram) else 0
            fit = min(here, nbytes // table.row_bytes)
            rows[i] += fit
            others[i] -= fit * count
            nbytes -= fit * table.row_bytes
            if fit < here:
                return rows, others
    return rows, others
