"""The planner against the obvious model, on random traces."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from model import Model

from gids import _core

LIST_POLICIES = ["lookahead", "lru", "static"]
ALL_POLICIES = [*LIST_POLICIES, "random", "window-pin", "pinned"]

Trace = list[npt.NDArray[np.int64]]


def random_trace(rng: np.random.Generator, pages: int, steps: int, batch: int) -> Trace:
    """Minibatches with repeated and skewed pages."""
    return [(pages * rng.random(rng.integers(0, batch + 1)) ** 2.5).astype(np.int64) for _ in range(steps)]


def resident_pages(planner: _core.Planner) -> set[int]:
    return set(np.flatnonzero(planner.words() >> np.uint64(62)).tolist())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", LIST_POLICIES)
def test_plan_keeps_as_many_pages_of_each_worth_as_the_model(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages = int(rng.integers(5, 400))
    lines = int(rng.integers(0, pages + 3))
    planned = int(rng.integers(1, 5))
    window = int(rng.integers(0, 24 - planned + 1))
    heat = rng.integers(0, 4 if seed % 2 else 256, pages).astype(np.uint8)
    trace = random_trace(rng, pages, 60, int(rng.integers(1, pages + 1)))
    keep = seed % 3 == 0
    if keep:
        heat[rng.permutation(pages)[: int(rng.integers(0, pages))]] = 255

    planner = _core.Planner(pages, lines, policy, 0, heat, keep)
    model = Model(lines, policy, heat, keep)
    entered = 0
    for t in range(len(trace)):
        if t >= planned:
            planner.retire(t - planned)
            model.retire(t - planned)
            planner.audit()
        while entered < min(len(trace), t + 1 + window):
            assert planner.enter(entered, trace[entered]) == len(set(trace[entered].tolist()))
            model.enter(entered, trace[entered])
            entered += 1
        planner.audit()
        hits, loads, bypasses = planner.plan(t)
        model_hits, keep, pinned = model.plan(t)
        assert hits == model_hits
        assert hits + loads + bypasses == len(model.live[t])
        model.check(t, resident_pages(planner), keep, pinned)
        planner.audit()


@pytest.mark.parametrize("policy", ["random", "window-pin", "pinned"])
@pytest.mark.parametrize("seed", range(20))
def test_random_victims_are_never_pages_that_are_needed(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages, lines, planned, window = 200, int(rng.integers(1, 120)), 2, 6
    trace = random_trace(rng, pages, 60, 60)
    heat = rng.integers(0, 8, pages).astype(np.uint8)
    planner = _core.Planner(pages, lines, policy, seed, heat)
    hottest = set(np.argsort(-heat.astype(int), kind="stable")[: int(0.4 * lines)].tolist())
    entered = 0
    for t in range(len(trace)):
        if t >= planned:
            planner.retire(t - planned)
        while entered < min(len(trace), t + 1 + window):
            planner.enter(entered, trace[entered])
            entered += 1
        before = resident_pages(planner)
        needed = (
            trace[max(0, t - planned + 1) : t + 1]
            if policy != "window-pin"
            else trace[max(0, t - planned + 1) : entered]
        )
        pages_needed = set(np.concatenate(needed).tolist()) | (hottest if policy == "pinned" else set())
        protected = before & pages_needed
        planner.plan(t)
        assert protected <= resident_pages(planner)
        planner.audit()
        wanted = set(np.concatenate(trace[max(0, t - planned + 1) : entered]).tolist())
        assert planner.lines_in_use() == len(resident_pages(planner) & wanted)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_after_a_stream_closed_early_no_mark_is_left_and_the_next_one_works(policy: str) -> None:
    rng = np.random.default_rng(7)
    pages = 300
    heat = rng.integers(0, 256, pages).astype(np.uint8)
    planner = _core.Planner(pages, 80, policy, 0, heat)
    step = 0
    for _ in range(25):
        trace = random_trace(rng, pages, 24, 100)
        entered = int(rng.integers(1, 25))
        planned = int(rng.integers(0, entered + 1))
        for i in range(entered):
            planner.enter(step + i, trace[i])
        for i in range(planned):
            planner.plan(step + i)
        for i in range(entered):
            planner.retire(step + i)
            planner.audit()
        assert not np.any(planner.words() & np.uint64(0xFFFFFF))
        step += entered


def test_pinned_pages_are_always_hits_once_they_were_read() -> None:
    rng = np.random.default_rng(4)
    heat = rng.permutation(256).astype(np.uint8)
    hottest = set(np.argsort(-heat.astype(int))[:20].tolist())
    planner, read = _core.Planner(256, 50, "pinned", 0, heat), set[int]()
    for step, pages in enumerate(random_trace(rng, 256, 60, 60)):
        planner.enter(step, pages)
        assert read & hottest <= resident_pages(planner)
        planner.plan(step)
        read |= set(pages.tolist())
        planner.retire(step)
    assert hottest <= read


def test_25_live_minibatches_are_refused() -> None:
    planner = _core.Planner(10, 4)
    for step in range(24):
        planner.enter(step, np.array([1], np.int64))
    with pytest.raises(RuntimeError, match="24"):
        planner.enter(24, np.array([1], np.int64))


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40, -(1 << 62)])
def test_an_id_out_of_range_marks_nothing(bad: int) -> None:
    planner = _core.Planner(10, 4)
    with pytest.raises(IndexError, match=f"id {bad} at position 1 is out of range for a table of 10 rows"):
        planner.enter(0, np.array([3, bad, 4], np.int64))
    assert not planner.words().any()
    assert planner.enter(0, np.array([3], np.int64)) == 1


def test_int32_pages_are_refused_not_converted() -> None:
    with pytest.raises(TypeError):
        _core.Planner(10, 4).enter(0, np.array([1], np.int32))


def test_steps_out_of_order_are_refused() -> None:
    planner = _core.Planner(10, 4)
    one = np.array([1], np.int64)
    planner.enter(0, one)
    with pytest.raises(RuntimeError, match="order"):
        planner.enter(2, one)
    planner.enter(1, one)
    with pytest.raises(RuntimeError, match="order"):
        planner.plan(1)
    with pytest.raises(RuntimeError, match="order"):
        planner.retire(1)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="lookahead, window-pin, random, lru, static"):
        _core.Planner(10, 4, "mru")


def test_a_table_of_more_than_2_to_the_32_pages_is_planned_like_a_small_one() -> None:
    """A minibatch keeps 8 bytes per page. Of 34 GB of page words only a few are touched."""
    pages = (1 << 32) + 1000
    try:
        planner = _core.Planner(pages, 30)
    except MemoryError:
        pytest.skip("no address space for 34 GB of page words")
    small = _core.Planner(80, 30)
    rng = np.random.default_rng(0)
    known = np.concatenate([np.arange(40), pages - 40 + np.arange(40)])
    for t, chosen in enumerate(random_trace(rng, 80, 60, 40)):
        assert planner.enter(t, known[chosen]) == small.enter(t, chosen)
        assert planner.plan(t) == small.plan(t)
        planner.retire(t)
        small.retire(t)
    assert planner.stats() == small.stats()
    assert planner.stats()["hits"] > 0
