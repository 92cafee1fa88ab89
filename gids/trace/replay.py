"""Replays a trace in a cache of any size, policy and window, without features or a disk.

Called by gids.bench. Uses the loader's planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.errors import FormatError
from gids.trace.optimum import Batches
from gids.trace.trace_file import ENTER, PLAN, Trace

LIVE_BATCHES = _core.USE_BITS  # window and planned minibatches together
_SAMPLES = 16


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class Counts:
    """Pages of each planned minibatch after the warm-up: int64[n] each.

    in_use: number of lines whose page is used by a minibatch in the window or planned; the mean over _SAMPLES
    minibatches. None: not counted.
    """

    pages: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    loads: npt.NDArray[np.int64]
    bypasses: npt.NDArray[np.int64]
    evictions: int
    in_use: float | None = None

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], evictions: int, in_use: float | None = None) -> Counts:
        """rows: int64[n, 4] of pages, hits, loads and bypasses."""
        pages, hits, loads, bypasses = rows.T.copy()
        return cls(pages, hits, loads, bypasses, evictions, in_use)

    @property
    def hit_ratio(self) -> float:
        """Hits / pages of all minibatches; 0 without pages."""
        total = int(self.pages.sum())
        return int(self.hits.sum()) / total if total else 0.0


def replay(
    trace: Batches,
    page_count: int,
    *,
    table: int = 0,
    lines: int,
    policy: str,
    window: int,
    planned: int,
    heat: npt.NDArray[np.uint8] | None = None,
    seed: int = 0,
    warm: int = 0,
    check: Callable[[], None] = _ignore,
) -> Counts:
    """Replay a trace in a cache, in the loader's order: retire t - planned, enter t + window, plan t.

    warm: number of minibatches not counted. check: called for each minibatch; may raise. Raises ValueError
    for an unknown policy, or if window + planned is too large.
    """
    if planned < 1 or window < 0 or window + planned > LIVE_BATCHES:
        raise ValueError(
            f"a window of {window} with {planned} planned minibatches is not possible: planned must be 1 or "
            f"more, and both together {LIVE_BATCHES} or less"
        )
    planner = _core.Planner(page_count, lines, policy, seed, heat)
    batches = trace.batch_count
    counts = np.zeros((batches, 4), np.int64)
    entered = evicted_before = 0
    in_use: list[int] = []
    every = max(1, (batches - warm) // _SAMPLES)
    for t in range(batches):
        check()
        if t == warm:
            evicted_before = planner.stats()["evictions"]
        if t >= planned:
            planner.retire(t - planned)
        # At the start the loader's window fills gradually.
        while entered < min(batches, t + 1 + min(window, t)):
            pages = trace.pages(entered, table)
            if planner.enter(entered, pages) != len(pages):
                raise _repeated(trace, entered)
            entered += 1
        hits, loads, bypasses = planner.plan(t)
        counts[t] = hits + loads + bypasses, hits, loads, bypasses
        if t >= warm and (t - warm) % every == 0:
            in_use.append(planner.lines_in_use())
    evictions = planner.stats()["evictions"] - evicted_before
    return Counts.of(counts[warm:], evictions, float(np.mean(in_use)) if in_use else None)


def replay_as_recorded(trace: Trace, table: int, *, check: Callable[[], None] = _ignore) -> Counts:
    """Replay a recorded run of one table with the same policy, lines and order of events.

    The counts are the same as in the run, unless reads failed or were cancelled because a stream was closed
    early. Raises ValueError for a sampled trace.
    """
    traced = trace.tables[table]
    if trace.policy is None or traced.lines is None:
        raise ValueError(f"{trace.path} was sampled, not recorded from a run, so it has no cache to replay")
    planner = _core.Planner(traced.page_count, traced.lines, trace.policy, 0, traced.heat)
    rows = []
    entered = planned = retired = 0
    for event in trace.events.tolist():
        if event == ENTER:
            check()
            pages = trace.pages(entered, table)
            if planner.enter(entered, pages) != len(pages):
                raise _repeated(trace, entered)
            entered += 1
        elif event == PLAN:
            hits, loads, bypasses = planner.plan(planned)
            rows.append((hits + loads + bypasses, hits, loads, bypasses))
            planned += 1
        else:
            planner.retire(retired)
            retired += 1
            planned = max(planned, retired)
    counts = np.array(rows, np.int64).reshape(-1, 4)
    return Counts.of(counts, planner.stats()["evictions"])


def _repeated(trace: Batches, batch: int) -> FormatError:
    return FormatError(
        f"{getattr(trace, 'path', 'trace')} has a page twice in minibatch {batch}: it is damaged"
    )
