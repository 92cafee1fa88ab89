"""Planning in device memory against the obvious model, and against the host planner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cache_runs import run
from model import Model
from raw_table import RawTable, write_raw_table

from gids import _core
from gids.cache.device import DeviceFeatureCache
from gids.cuda.device import Device
from gids.io import open_engine

Trace = list[npt.NDArray[np.int64]]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> RawTable:
    """One short row per page, as only metadata matters."""
    rows = torch.arange(20_000, dtype=torch.int64).repeat_interleave(64).view(-1, 64)
    return write_raw_table(tmp_path_factory.mktemp("plan"), rows, page_bytes=512)


@pytest.fixture
def open_cache(device: Device) -> Iterator[object]:
    opened = []

    def build(table: RawTable, lines: int, host_lines: int = 0, **options: object) -> DeviceFeatureCache:
        engine = open_engine(table.shard_paths, max_read_bytes=table.page_bytes)
        cache = DeviceFeatureCache(
            device,
            engine,
            [table],  # type: ignore[list-item]
            lines={table.name: lines},
            host_lines={table.name: host_lines},
            staging_bytes=1 << 20,
            preload_hottest=False,
            **options,  # type: ignore[arg-type]
        )
        opened.append((cache, engine))
        return cache

    yield build
    for cache, engine in opened:
        cache.close()
        engine.close()


def random_trace(rng: np.random.Generator, pages: int, steps: int, batch: int) -> Trace:
    """Minibatches with repeated and skewed pages."""
    return [(pages * rng.random(rng.integers(0, batch + 1)) ** 2.5).astype(np.int64) for _ in range(steps)]


def held_pages(cache: DeviceFeatureCache, table: RawTable) -> set[int]:
    return set(np.flatnonzero(cache.page_words(table.name) >> np.uint64(62)).tolist())


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["lookahead", "static"])
def test_plan_keeps_as_many_pages_of_each_worth_as_the_model(
    table: RawTable, open_cache: object, policy: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pages = int(rng.integers(5, 400))
    lines, host_lines = int(rng.integers(0, pages + 3)), int(rng.integers(0, 2)) * int(rng.integers(0, 50))
    planned = int(rng.integers(1, 5))
    window = int(rng.integers(0, 24 - planned + 1))
    heat = np.zeros(table.page_count, np.uint8)
    heat[:pages] = rng.integers(0, 4 if seed % 2 else 256, pages)
    trace = random_trace(rng, pages, 25, int(rng.integers(1, pages + 1)))
    print(f"pages {pages}, lines {lines} + {host_lines}, window {window}, planned {planned}")

    cache = open_cache(table, lines, host_lines, policy=policy, heats={table.name: heat})  # type: ignore[operator]
    model = Model(lines + host_lines, policy, heat)
    hits = entered = gathered = 0
    for t in range(len(trace)):
        if t >= planned:
            _, error = cache.gather(t - planned)
            assert error is None
            cache.retire(t - planned)
            model.retire(t - planned)
        while entered < min(len(trace), t + 1 + window):
            cache.enter(entered, {table.name: torch.from_numpy(trace[entered])})
            model.enter(entered, trace[entered])
            entered += 1
        cache.plan(t)
        model_hits, keep, pinned = model.plan(t)
        hits += model_hits
        model.check(t, held_pages(cache, table), keep, pinned)
        cache.audit()
    for t in range(max(0, len(trace) - planned), len(trace)):
        cache.gather(t)
        cache.retire(t)
    stats = cache.stats()[table.name]
    assert stats["steps"] == len(trace)
    assert stats["hits"] == hits
    assert stats["pages"] == sum(len(set(batch.tolist())) for batch in trace)
    assert stats["misses"] == stats["loads"] + stats["bypasses"] == stats["pages"] - stats["hits"]
    assert stats["loads"] - stats["evictions"] == len(held_pages(cache, table))
    assert gathered == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", ["random", "window-pin"])
@pytest.mark.parametrize("seed", range(3))
def test_random_victims_are_never_pages_that_are_needed(
    table: RawTable, open_cache: object, policy: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pages, lines, planned, window = 200, int(rng.integers(1, 120)), 2, 6
    trace = random_trace(rng, pages, 25, 60)
    cache = open_cache(table, lines, policy=policy, heats={})  # type: ignore[operator]
    entered = 0
    for t in range(len(trace)):
        if t >= planned:
            cache.gather(t - planned)
            cache.retire(t - planned)
        while entered < min(len(trace), t + 1 + window):
            cache.enter(entered, {table.name: torch.from_numpy(trace[entered])})
            entered += 1
        before = held_pages(cache, table)
        end = t + 1 if policy == "random" else entered
        needed = before & set(np.concatenate(trace[max(0, t - planned + 1) : end]).tolist())
        cache.plan(t)
        after = held_pages(cache, table)
        assert needed <= after
        # Every missing page gets a line while some line may be replaced.
        missing = set(trace[t].tolist()) - before
        assert len(after - before) == min(len(missing), lines - len(needed))
        cache.audit()


def host_hits(
    pages: int, lines: int, heat: npt.NDArray[np.uint8], trace: Trace, window: int, planned: int
) -> int:
    planner = _core.Planner(pages, lines, "lookahead", 0, heat)
    entered = hits = 0
    for t in range(len(trace)):
        if t >= planned:
            planner.retire(t - planned)
        while entered < min(len(trace), t + 1 + window):
            planner.enter(entered, trace[entered])
            entered += 1
        hits += planner.plan(t)[0]
    return hits


@pytest.mark.slow
def test_a_bounded_scan_hits_as_often_as_the_host_planner(table: RawTable, open_cache: object) -> None:
    rng = np.random.default_rng(12)
    pages, batch = table.page_count, 1500
    visits = (1 + np.arange(pages)) ** -0.7
    of = rng.permutation(pages)
    trace = [of[np.unique(rng.choice(pages, batch, p=visits / visits.sum()))] for _ in range(60)]
    heat = np.zeros(pages, np.uint8)
    heat[of] = (np.log2(visits) - np.log2(visits[-1])) * 10
    lines = 5 * batch  # more than a scan sees
    cache = open_cache(table, lines, heats={table.name: heat})  # type: ignore[operator]
    for _ in run(cache, [{table.name: torch.from_numpy(batch)} for batch in trace], 16, 2):
        pass
    stats = cache.stats()[table.name]
    total = sum(len(batch) for batch in trace)
    assert stats["pages"] == total
    host = host_hits(pages, lines, heat, trace, 16, 2)
    print(f"hits: device {stats['hits'] / total:.4f}, host {host / total:.4f}")
    assert stats["hits"] >= 0.99 * host
