"""Pages that a cache misses, by its size: of a static cache of the pages with the most heat, or of LRU.

Called by curves.py with the pages of each minibatch. Sizes are shares of a table's pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.cache.heat import page_weights
from gids.store import FeatureStore, Table

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_STATIC = np.concatenate([[0.0], np.geomspace(1e-4, 1, 121)])
_LRU = np.concatenate([[0.0], np.geomspace(1 / 256, 1, 9)])
_LRU_MINIBATCHES = 16
_LRU_PAGES = 4_000_000  # fewer minibatches if they read more pages than this together
_LRU_LEAST = 4


@dataclass(frozen=True)
class Misses:
    """pages: of a minibatch, missed by a cache that holds a share of the table: by ascending share."""

    shares: Floats
    pages: Floats

    def at(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.pages))


class Static:
    """A cache that holds the pages whose rows have the most heat: the best that is stored, or out-degrees."""

    needs_more = False

    def __init__(self, rank: Ids) -> None:
        """rank: of rank_of_pages()."""
        self._rank = rank
        self._total = np.zeros(len(_STATIC), np.float64)
        self._minibatches = 0

    def add(self, pages: Ids) -> None:
        ranks = np.sort(self._rank[pages])
        lines = np.round(_STATIC * len(self._rank)).astype(np.int64)
        self._total += len(ranks) - np.searchsorted(ranks, lines)
        self._minibatches += 1

    def misses(self) -> Misses:
        return Misses(_STATIC, self._total / self._minibatches)


class LeastRecent:
    """Caches of several sizes that keep the pages used last. The second half of the minibatches counts."""

    def __init__(self, page_count: int) -> None:
        lines = np.maximum(1, np.round(_LRU[1:] * page_count)).astype(np.int64)
        self._caches = [_core.Planner(page_count, int(n), "lru") for n in lines]
        self._missed: list[list[int]] = []
        self._asked: list[int] = []

    def add(self, pages: Ids) -> None:
        step, missed = len(self._missed), []
        for cache in self._caches:
            if step:
                cache.retire(step - 1)
            cache.enter(step, pages)
            missed.append(len(pages) - cache.plan(step)[0])
        self._missed.append(missed)
        self._asked.append(len(pages))

    @property
    def needs_more(self) -> bool:
        """Whether more minibatches must be added: the first ones only fill the caches."""
        done = len(self._missed)
        return done < _LRU_LEAST or (done < _LRU_MINIBATCHES and sum(self._asked) < _LRU_PAGES)

    def misses(self) -> Misses:
        warm = len(self._missed) // 2
        missed = np.mean(self._missed[warm:], axis=0)
        return Misses(_LRU, np.concatenate([[np.mean(self._asked[warm:])], missed]))


def rank_of_pages(store: FeatureStore, table: Table) -> Ids:
    """The place of each page by decreasing heat: int64[page_count]."""
    assert isinstance(table.type, str)
    weights: npt.NDArray[np.floating] = np.zeros(table.page_count)
    if methods := store.heat_methods(table.type):
        weights = page_weights(store.heat(methods[0], table.type), table.rows_per_page, table.order)
    rank = np.empty(table.page_count, np.int64)
    rank[np.argsort(-weights, kind="stable")] = np.arange(table.page_count)
    return rank
