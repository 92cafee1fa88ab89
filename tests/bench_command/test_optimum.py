"""Belady's MIN equals brute force on tiny traces, and hits at least as much as any policy on random ones."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from gids import _core
from gids.bench.trace import Optimum, replay
from gids.cache import POLICIES

Pages = npt.NDArray[np.int64]


def random_trace(rng, pages, batches, most):
    """Skewed minibatches of distinct pages; some are empty."""
    found = []
    for _ in range(batches):
        drawn = np.unique((pages * rng.random(rng.integers(0, most + 1)) ** 2.5).astype(np.int64))
        found.append(rng.permutation(drawn))
    return found


def brute_force(trace, lines):
    """The greatest number of hits, by trying all choices of pages to keep after each minibatch."""
    batches = [frozenset(b.tolist()) for b in trace]

    @cache
    def best(t, held):
        if t == len(batches):
            return 0
        candidates = sorted(held | batches[t])
        kept = min(lines, len(candidates))
        after = max(best(t + 1, frozenset(chosen)) for chosen in combinations(candidates, kept))
        return len(held & batches[t]) + after

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_min_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    pages = int(rng.integers(2, 7))
    trace = random_trace(rng, pages, int(rng.integers(1, 7)), pages)
    for lines in range(pages + 1):
        assert int(Optimum(trace, pages).hits(lines).sum()) == brute_force(trace, lines)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_hits_more_than_min(policy, seed):
    rng = np.random.default_rng(seed)
    pages, planned = int(rng.integers(5, 400)), int(rng.integers(1, 5))
    window = int(rng.integers(0, 24 - planned + 1))
    trace = random_trace(rng, pages, 60, int(rng.integers(1, pages + 1)))
    optimum = Optimum(trace, pages)
    options = {"policy": policy, "window": window, "planned": planned, "seed": seed}
    heat = rng.integers(0, 256, pages).astype(np.uint8)
    for lines in (0, 1, pages // 10, pages // 3, pages):
        for warm in (0, 20, 59):
            found = replay(trace, pages, lines=lines, heat=heat, warm=warm, **options)
            best = optimum.hits(lines, warm=warm)[warm:]
            assert found.hits.sum() <= best.sum()
            pages_read = found.hits + found.loads + found.bypasses
            assert pages_read.tolist() == [len(batch) for batch in trace[warm:]]


def test_unique_pages_keep_the_order_of_first_use():
    rng = np.random.default_rng(5)
    marks = np.zeros(100, np.uint32)
    for mark in range(1, 20):
        ids = rng.integers(0, 400, rng.integers(0, 300))
        out = np.empty(len(ids), np.int64)
        count = _core.unique_pages(ids, 4, marks, mark, out)
        assert out[:count].tolist() == list(dict.fromkeys((ids // 4).tolist()))
    with pytest.raises(IndexError, match="id 400 at position 1 is beyond page 100"):
        _core.unique_pages(np.array([3, 400]), 4, marks, 99, np.empty(2, np.int64))
