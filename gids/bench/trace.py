"""Traces of the pages that minibatches read, replays of them in a cache of any size, policy and window, and
Belady's MIN.

Called by `gids bench hit-ratio` and bench/cache.py. A replay needs no features and no disk, and uses the
loader's planner. A trace is a list: the distinct pages of each minibatch, integers[n] in the order of first
use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.bench.sampling import input_nodes
from gids.errors import FormatError
from gids.sampler import Minibatch
from gids.store import FeatureStore, Table
from gids.store.table import positions_of
from gids.write.row_order import community_order, degree_order

ORDERS = ("stored", "original", "degree", "community")
"""Orders of rows: that of the dataset, by id, and those of `gids convert --order`."""

LIVE_BATCHES = _core.USE_BITS  # window and planned minibatches together

Pages = npt.NDArray[np.integer[Any]]


class TouchedPages:
    """Turns ids of rows into the distinct pages that hold them, with a mark of 4 B per page.

    positions: of each row in the table; None: in the order of the ids.
    """

    def __init__(self, page_count: int, rows_per_page: int, positions: npt.NDArray[Any] | None) -> None:
        self._rows_per_page, self._positions = rows_per_page, positions
        self._marks = np.zeros(page_count, np.uint32)
        self._mark = 0  # of the last minibatch

    def of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The pages of these rows, in the order of first use: int64[n]."""
        self._mark += 1
        rows = ids if self._positions is None else positions_of(ids, self._positions)
        pages = np.empty(len(rows), np.int64)
        count = _core.unique_pages(
            np.ascontiguousarray(rows), self._rows_per_page, self._marks, self._mark, pages
        )
        return pages[:count]


def sampled_pages(
    minibatches: Iterable[Minibatch], table: Table, positions: npt.NDArray[Any] | None
) -> list[Pages]:
    """The trace of sampled minibatches: 4 B of memory per page of each. positions: see TouchedPages."""
    touched = TouchedPages(table.page_count, table.rows_per_page, positions)
    kind = np.uint32 if table.page_count <= 1 << 32 else np.uint64
    return [touched.of(input_nodes(m, str(table.type)).numpy()).astype(kind) for m in minibatches]


def positions_in(order: str, store: FeatureStore, table: Table) -> npt.NDArray[Any] | None:
    """The position of each row of a table of nodes in one of ORDERS: int32 or int64[row_count]; None: by id.

    Raises FormatError if the dataset lacks what the order needs.
    """
    if order in ("stored", "original"):
        return table.order if order == "stored" else None
    ntype = str(table.type)
    degrees = store.out_degrees(ntype)
    if degrees is None:
        raise FormatError(f"{store.name} has no edges from {ntype!r} nodes, which order {order!r} needs")
    graphs = [store.graph(r) for r in store.relations if order == "community" and r[0] == r[2] == ntype]
    if not graphs:
        return degree_order(degrees)
    return community_order([(graph.indptr, graph.indices) for graph in graphs], degrees)


class Counts(NamedTuple):
    """Pages of each minibatch after the warm-up, which were hit, loaded or bypassed: int64[n] each."""

    hits: npt.NDArray[np.int64]
    loads: npt.NDArray[np.int64]
    bypasses: npt.NDArray[np.int64]


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

    window + planned: at most LIVE_BATCHES. warm: number of minibatches not counted. Raises ValueError for an
    unknown policy.
    """
    assert planned >= 1
    assert window + planned <= LIVE_BATCHES
    planner = _core.Planner(page_count, lines, policy, seed, heat)
    counts = np.zeros((len(batches), 3), np.int64)
    entered = 0
    for t in range(len(batches)):
        if t >= planned:
            planner.retire(t - planned)
        # At the start the loader's window fills gradually.
        while entered < min(len(batches), t + 1 + min(window, t)):
            pages = batches[entered].astype(np.int64, copy=False)
            assert planner.enter(entered, pages) == len(pages), "a minibatch has a page twice"
            entered += 1
        counts[t] = planner.plan(t)
    return Counts(*counts[warm:].T)


class Optimum:
    """Belady's MIN over the batches of replay(): the greatest number of hits of any cache, with bypass.

    The pages of a minibatch that are in the cache when it comes are hits. After it, MIN keeps the best choice
    of the pages in the cache and the pages of the minibatch, knowing the future. The policies of gids choose
    under the same rule, so none can hit more.

    Built in one backward pass over the trace. Needs 4 B per page of the table and 4 B per page of each
    minibatch.
    """

    def __init__(self, batches: Sequence[Pages], page_count: int) -> None:
        self._ends = np.cumsum([0, *map(len, batches)], dtype=np.int64)
        self._next = np.empty(int(self._ends[-1]), np.uint32)
        following = np.full(page_count, len(batches), np.uint32)
        for batch in range(len(batches) - 1, -1, -1):
            pages = batches[batch]
            self._next[self._ends[batch] : self._ends[batch + 1]] = following[pages]
            following[pages] = batch

    def hits(self, lines: int, *, warm: int = 0) -> npt.NDArray[np.int64]:
        """The number of pages of each minibatch that MIN hits: int64[minibatches].

        warm: the minibatch where counting starts. Before it no page is evicted, so that from there on no
        cache that started empty can hit more.
        """
        hits = np.empty(len(self._ends) - 1, np.int64)
        _core.min_hits(self._next, self._ends, lines, warm, hits)
        return hits
