"""The most that any cache could hit: Belady's MIN, at the granularity of minibatches, with bypass.

A minibatch's pages are wanted together; those that are held when it comes are hits. What is held afterwards
is the best choice among what was held and the minibatch's own pages, for whoever knows the future. The
planner's policies choose under the same rule, so none can hit more. Called by hit_ratio.py and advise.py.
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
_IN_MEMORY = 1 << 24  # pages of a trace whose next uses are kept in memory; of longer ones, in a file


class Batches(Protocol):
    """What MIN needs of a trace: gids.trace.Trace has it, and BatchList."""

    @property
    def batch_count(self) -> int: ...
    def pages(self, batch: int, table: int = 0) -> Pages: ...
    def page_counts(self, table: int = 0) -> Pages: ...


@dataclass
class BatchList:
    """A trace of one table in memory. batches: int64[n] each, a page at most once in each."""

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

    Built in one pass over the trace from its end: 4 B per page of the table, and 4 B per page of each
    minibatch (in a temporary file where these are many). check: called for each minibatch; may raise.
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
            with tempfile.TemporaryFile() as file:  # gone when its map is
                self._next = np.memmap(file, np.uint32, "w+", shape=(total,))
        following = np.full(page_count, batches, np.uint32)
        for batch in range(batches - 1, -1, -1):
            check()
            pages = trace.pages(batch, table)
            self._next[self._ends[batch] : self._ends[batch + 1]] = following[pages]
            following[pages] = batch

    def hits(self, lines: int, *, warm: int = 0) -> Pages:
        """How many pages of each minibatch MIN hits: int64[batch_count].

        warm: where counting begins. Until that minibatch nothing is dropped, so that from there on no cache
        that began empty can hit more, whatever it gave up before.
        """
        hits = np.empty(len(self._ends) - 1, np.int64)
        _core.min_hits(self._next, self._ends, lines, warm, hits)
        return hits
