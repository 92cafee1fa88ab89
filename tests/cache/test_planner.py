"""The planners, on the host and in device memory, against the obvious model, on random traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cache_runs import Make, run
from planner_model import Model
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cache.device import DeviceFeatureCache
from gids.cuda.device import Device

Trace = list[npt.NDArray[np.int64]]
LIST_POLICIES = ["lookahead", "lru", "static"]


def random_trace(rng: np.random.Generator, pages: int, steps: int, batch: int) -> Trace:
    """Minibatches with repeated and skewed pages."""
    return [(pages * rng.random(rng.integers(0, batch + 1)) ** 2.5).astype(np.int64) for _ in range(steps)]


def in_order(
    trace: Trace,
    window: int,
    planned: int,
    enter: Callable[[int, npt.NDArray[np.int64]], object],
    retire: Callable[[int], object],
) -> Iterator[tuple[int, int]]:
    """The loader's order of calls. Yields each step that is to be planned, and the number of entered ones."""
    entered = 0
    for t in range(len(trace)):
        if t >= planned:
            retire(t - planned)
        while entered < min(len(trace), t + 1 + window):
            enter(entered, trace[entered])
            entered += 1
        yield t, entered


def resident_pages(planner: _core.Planner) -> set[int]:
    return set(np.flatnonzero(planner.words() >> np.uint64(62)).tolist())


@pytest.mark.parametrize("seed", range(6))
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

    def enter(step: int, batch: npt.NDArray[np.int64]) -> None:
        assert planner.enter(step, batch) == len(set(batch.tolist()))
        model.enter(step, batch)

    def retire(step: int) -> None:
        planner.retire(step)
        model.retire(step)
        planner.audit()

    for t, _ in in_order(trace, window, planned, enter, retire):
        planner.audit()
        hits, loads, bypasses = planner.plan(t)
        model_hits, keep, pinned = model.plan(t)
        assert hits == model_hits
        assert hits + loads + bypasses == len(model.live[t])
        model.check(t, resident_pages(planner), keep, pinned)
        planner.audit()


@pytest.mark.parametrize("policy", ["random", "window-pin", "pinned"])
@pytest.mark.parametrize("seed", range(5))
def test_random_victims_are_never_pages_that_are_needed(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages, lines, planned, window = 200, int(rng.integers(1, 120)), 2, 6
    trace = random_trace(rng, pages, 60, 60)
    heat = rng.integers(0, 8, pages).astype(np.uint8)
    planner = _core.Planner(pages, lines, policy, seed, heat)
    hottest = set(np.argsort(-heat.astype(int), kind="stable")[: int(0.4 * lines)].tolist())
    for t, entered in in_order(trace, window, planned, planner.enter, planner.retire):
        needed = trace[max(0, t - planned + 1) : entered if policy == "window-pin" else t + 1]
        wanted = set(np.concatenate(needed).tolist()) | (hottest if policy == "pinned" else set())
        protected = resident_pages(planner) & wanted
        planner.plan(t)
        assert protected <= resident_pages(planner)
        planner.audit()


def test_an_id_out_of_range_marks_nothing() -> None:
    planner = _core.Planner(10, 4)
    for bad in (-1, 10):
        with pytest.raises(
            IndexError, match=f"id {bad} at position 1 is out of range for a table of 10 rows"
        ):
            planner.enter(0, np.array([3, bad, 4], np.int64))
        assert not planner.words().any()


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


# --- in device memory ---


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> RawTable:
    """One short row per page, as only metadata matters."""
    rows = torch.arange(20_000, dtype=torch.int64).repeat_interleave(64).view(-1, 64)
    return write_raw_table(tmp_path_factory.mktemp("plan"), rows, page_bytes=512)


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    with Make(device, preload_hottest=False) as made:
        yield made


def held_pages(cache: DeviceFeatureCache, table: RawTable) -> set[int]:
    return set(np.flatnonzero(cache.page_words(table.name) >> np.uint64(62)).tolist())


@pytest.mark.parametrize(("policy", "seed"), [("lookahead", 1), ("lookahead", 2), ("static", 0)])
def test_plan_on_a_device_keeps_as_many_pages_of_each_worth_as_the_model(
    table: RawTable, make: Make, policy: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pages = int(rng.integers(5, 400))
    lines, host_lines = int(rng.integers(0, pages + 3)), int(rng.integers(0, 2)) * int(rng.integers(0, 50))
    planned = int(rng.integers(1, 5))
    window = int(rng.integers(0, 24 - planned + 1))
    heat = np.zeros(table.page_count, np.uint8)
    heat[:pages] = rng.integers(0, 4 if seed % 2 else 256, pages)
    trace = random_trace(rng, pages, 25, int(rng.integers(1, pages + 1)))

    cache = make(table, lines, host_lines, policy=policy, heats={table.name: heat})
    model = Model(lines + host_lines, policy, heat)
    hits = 0

    def enter(step: int, pages: npt.NDArray[np.int64]) -> None:
        cache.enter(step, {table.name: torch.from_numpy(pages)})
        model.enter(step, pages)

    def retire(step: int) -> None:
        _, error = cache.gather(step)
        assert error is None
        cache.retire(step)
        model.retire(step)

    for t, _ in in_order(trace, window, planned, enter, retire):
        cache.plan(t)
        model_hits, keep, pinned = model.plan(t)
        hits += model_hits
        model.check(t, held_pages(cache, table), keep, pinned)
        cache.audit()
    for t in range(max(0, len(trace) - planned), len(trace)):
        retire(t)
    stats = cache.stats()[table.name]
    assert stats["steps"] == len(trace)
    assert stats["hits"] == hits
    assert stats["pages"] == sum(len(set(batch.tolist())) for batch in trace)
    assert stats["misses"] == stats["loads"] + stats["bypasses"] == stats["pages"] - stats["hits"]
    assert stats["loads"] - stats["evictions"] == len(held_pages(cache, table))


def test_the_window_pins_lines_on_a_device(table: RawTable, make: Make) -> None:
    cache = make(table, 10, policy="window-pin")
    for step, first in enumerate((0, 10, 0)):
        cache.enter(step, {table.name: torch.arange(first, first + 10)})
    for step in range(3):
        cache.plan(step)
        _, error = cache.gather(step)
        assert error is None
        cache.retire(step)
        assert held_pages(cache, table) == set(range(10))
    assert cache.stats()[table.name]["hits"] == 10


def host_hits(
    pages: int, lines: int, heat: npt.NDArray[np.uint8], trace: Trace, window: int, planned: int
) -> int:
    planner = _core.Planner(pages, lines, "lookahead", 0, heat)
    return sum(planner.plan(t)[0] for t, _ in in_order(trace, window, planned, planner.enter, planner.retire))


@pytest.mark.slow
def test_a_bounded_scan_hits_as_often_as_the_host_planner(table: RawTable, make: Make) -> None:
    rng = np.random.default_rng(12)
    pages, batch = table.page_count, 1500
    visits = (1 + np.arange(pages)) ** -0.7
    of = rng.permutation(pages)
    trace = [of[np.unique(rng.choice(pages, batch, p=visits / visits.sum()))] for _ in range(60)]
    heat = np.zeros(pages, np.uint8)
    heat[of] = (np.log2(visits) - np.log2(visits[-1])) * 10
    lines = 5 * batch  # more than a scan sees
    cache = make(table, lines, heats={table.name: heat})
    for _ in run(cache, [{table.name: torch.from_numpy(batch)} for batch in trace], 16, 2):
        pass
    stats = cache.stats()[table.name]
    total = sum(len(batch) for batch in trace)
    assert stats["pages"] == total
    host = host_hits(pages, lines, heat, trace, 16, 2)
    print(f"hits: device {stats['hits'] / total:.4f}, host {host / total:.4f}")
    assert stats["hits"] >= 0.99 * host
