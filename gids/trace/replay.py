"""Replays a trace in a cache of any size, policy and window, without features or a disk; and Belady's MIN.

Called by gids.bench. Uses the loader's planner.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.errors import FormatError
from gids.trace.recording import ENTER, PLAN, Pages, Trace

LIVE_BATCHES = _core.USE_BITS  # window and planned minibatches together
_SAMPLES = 16
_IN_MEMORY = 1 << 24  # pages of a trace; the next uses of longer traces are kept in a file


@dataclass(frozen=True)
class Counts:
    """Pages of each planned minibatch after the warm-up, which were hit, loaded or bypassed: int64[n] each.

    in_use: number of lines whose page is used by a minibatch in the window or planned; the mean over _SAMPLES
    minibatches. None: not counted.
    """

    hits: npt.NDArray[np.int64]
    loads: npt.NDArray[np.int64]
    bypasses: npt.NDArray[np.int64]
    evictions: int
    in_use: float | None = None

    @property
    def pages(self) -> npt.NDArray[np.int64]:
        return self.hits + self.loads + self.bypasses

    @property
    def hit_ratio(self) -> float:
        """Hits / pages of all minibatches; 0 without pages."""
        total = int(self.pages.sum())
        return int(self.hits.sum()) / total if total else 0.0


def replay(
    batches: Sequence[Pages],
    page_count: int,
    *,
    lines: int,
    policy: str,
    window: int,
    planned: int,
    heat: npt.NDArray[np.uint8] | None = None,
    seed: int = 0,
    warm: int = 0,
) -> Counts:
    """Replay a trace in a cache, in the loader's order: retire t - planned, enter t + window, plan t.

    batches: the distinct pages of each minibatch, int64[n]; see Trace.batches(). warm: number of minibatches
    not counted. Raises ValueError for an unknown policy, or if window + planned is too large.
    """
    if planned < 1 or window < 0 or window + planned > LIVE_BATCHES:
        raise ValueError(
            f"a window of {window} with {planned} planned minibatches is not possible: planned must be 1 or "
            f"more, and both together {LIVE_BATCHES} or less"
        )
    planner = _core.Planner(page_count, lines, policy, seed, heat)
    counts = np.zeros((len(batches), 3), np.int64)
    entered = evicted_before = 0
    in_use: list[int] = []
    every = max(1, (len(batches) - warm) // _SAMPLES)
    for t in range(len(batches)):
        if t == warm:
            evicted_before = planner.stats()["evictions"]
        if t >= planned:
            planner.retire(t - planned)
        # At the start the loader's window fills gradually.
        while entered < min(len(batches), t + 1 + min(window, t)):
            _enter(planner, batches, entered)
            entered += 1
        counts[t] = planner.plan(t)
        if t >= warm and (t - warm) % every == 0:
            in_use.append(planner.lines_in_use())
    evictions = planner.stats()["evictions"] - evicted_before
    hits, loads, bypasses = counts[warm:].T
    return Counts(hits, loads, bypasses, evictions, float(np.mean(in_use)) if in_use else None)


def replay_as_recorded(trace: Trace, table: int) -> Counts:
    """Replay a recorded run of one table with the same policy, lines and order of events.

    The counts are the same as in the run, unless reads failed or were cancelled because a stream was closed
    early. Raises ValueError for a sampled trace.
    """
    traced = trace.tables[table]
    if trace.policy is None or traced.lines is None:
        raise ValueError(f"{trace.path} was sampled, not recorded from a run, so it has no cache to replay")
    planner = _core.Planner(traced.page_count, traced.lines, trace.policy, 0, traced.heat)
    rows, batches = [], trace.batches(table)
    entered = planned = retired = 0
    for event in trace.events.tolist():
        if event == ENTER:
            _enter(planner, batches, entered)
            entered += 1
        elif event == PLAN:
            rows.append(planner.plan(planned))
            planned += 1
        else:
            planner.retire(retired)
            retired += 1
            planned = max(planned, retired)
    hits, loads, bypasses = np.array(rows, np.int64).reshape(-1, 3).T
    return Counts(hits, loads, bypasses, planner.stats()["evictions"])


def _enter(planner: Any, batches: Sequence[Pages], batch: int) -> None:
    pages = batches[batch]
    if planner.enter(batch, pages) != len(pages):
        path = getattr(batches, "path", "the trace")
        raise FormatError(f"{path} has a page twice in minibatch {batch}: it is damaged")


class Optimum:
    """Belady's MIN over the batches of replay(): the greatest number of hits of any cache, with bypass.

    The pages of a minibatch that are in the cache when it comes are hits. After it, MIN keeps the best choice
    of the pages in the cache and the pages of the minibatch, knowing the future. The policies of gids choose
    under the same rule, so none can hit more.

    Built in one backward pass over the trace. Needs 4 B per page of the table and 4 B per page of each
    minibatch (in a temporary file for long traces).
    """

    def __init__(self, batches: Sequence[Pages], page_count: int) -> None:
        self._ends = np.cumsum([0, *map(len, batches)], dtype=np.int64)
        total = int(self._ends[-1])
        self._next: npt.NDArray[np.uint32]
        if total <= _IN_MEMORY:
            self._next = np.empty(total, np.uint32)
        else:
            with tempfile.TemporaryFile() as file:  # deleted with its map
                os.posix_fallocate(file.fileno(), 0, 4 * total)  # a map on a full disk ends the process
                self._next = np.memmap(file, np.uint32, "r+", shape=(total,))
        following = np.full(page_count, len(batches), np.uint32)
        for batch in range(len(batches) - 1, -1, -1):
            pages = batches[batch]
            self._next[self._ends[batch] : self._ends[batch + 1]] = following[pages]
            following[pages] = batch

    def hits(self, lines: int, *, warm: int = 0) -> Pages:
        """The number of pages of each minibatch that MIN hits: int64[batch_count].

        warm: the minibatch where counting starts. Before it no page is evicted, so that from there on no
        cache that started empty can hit more.
        """
        hits = np.empty(len(self._ends) - 1, np.int64)
        _core.min_hits(self._next, self._ends, lines, warm, hits)
        return hits
