"""Belady's MIN: the greatest number of hits of any cache, per minibatch, with bypass.

The pages of a minibatch that are in the cache when it comes are hits. After it, MIN keeps the best choice of
the pages in the cache and the pages of the minibatch, knowing the future. The policies of gids choose under
the same rule, so none can hit more. Called by gids.bench.case.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gids import _core

Pages = npt.NDArray[np.int64]
_IN_MEMORY = 1 << 24  # pages of a trace; the next uses of longer traces are kept in a file


class Batches(Protocol):
    """The part of a trace that MIN needs: a gids.trace.Trace or a BatchList."""

    @property
    def batch_count(self) -> int: ...
    def pages(self, batch: int, table: int = 0) -> Pages: ...
    def page_counts(self, table: int = 0) -> Pages: ...


@dataclass
class BatchList:
    """A trace of one table in memory. batches: int64[n] each, distinct pages."""

    batches: Sequence[Pages]

    @property
    def batch_count(self) -> int:
        return len(self.batches)

    def pages(self, batch: int, table: int = 0) -> Pages:
        return self.batches[batch]

    def page_counts(self, table: int = 0) -> Pages:
        return np.array([len(pages) for pages in self.batches], np.int64)


def _ignore() -> None:
    pass


class Optimum:
    """MIN over one table of a trace, for caches of any size.

    Built in one backward pass over the trace. Needs 4 B per page of the table and 4 B per page of each
    minibatch (in a temporary file for long traces). check: called for each minibatch; may raise.
    """

    def __init__(
        self, trace: Batches, page_count: int, *, table: int = 0, check: Callable[[], None] = _ignore
    ) -> None:
        batches = trace.batch_count
        self._ends = np.concatenate([[0], np.cumsum(trace.page_counts(table))]).astype(np.int64)
        total = int(self._ends[-1])
        self._next: npt.NDArray[np.uint32]
        if total <= _IN_MEMORY:
            self._next = np.empty(total, np.uint32)
        else:
            with tempfile.TemporaryFile() as file:  # deleted with its map
                self._next = np.memmap(file, np.uint32, "w+", shape=(total,))
        following = np.full(page_count, batches, np.uint32)
        for batch in range(batches - 1, -1, -1):
            check()
            pages = trace.pages(batch, table)
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
