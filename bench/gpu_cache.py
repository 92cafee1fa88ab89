"""Does the cache in device memory gather as fast as the device copies, and what does planning cost?

Called by gpu.py. gather: rows that are all in lines, in random order, compared with a copy of the same number
of bytes within device memory, and with torch.index_select on the device. Kernels only, by the device's clock.

planning: enter + plan + retire of minibatches of skewed ids with a hit ratio of about one half, including the
posting of their reads, by the device's clock and the host's; compared with the planner on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from gpu_harness import TABLE, Bench, assert_same_rows, device_seconds, make_table, open_cache
from harness import alternate

from gids.cache import FeatureCache
from gids.cache.device import DeviceFeatureCache
from gids.cache.device.state import THROUGH
from gids.io import open_engine

SIZES = {
    "table_bytes": (1 << 30, 256 << 10),  # of features, and of each copy that is compared
    "repeats": (9, 1),
    "ids": (65536, 200),  # drawn for a minibatch to plan
    "minibatches": (24, 3),
    "staging_bytes": (256 << 20, 1 << 20),
}


def gather(bench: Bench) -> None:
    for row_bytes, bar in ((4096, 0.8), (512, 0.5)):
        table, rows = make_table(bench.directory, row_bytes, bench.sizes.table_bytes)
        options = {"lines": {TABLE: table.page_count}, "heats": {TABLE: np.ones(table.page_count, np.uint8)}}
        with open_cache(bench.device, table, **options, staging_bytes=bench.sizes.staging_bytes) as cache:
            _gather(bench, cache, rows, f"gather of {row_bytes} B rows, all hits", bar)


def _gather(bench: Bench, cache: DeviceFeatureCache, rows: torch.Tensor, name: str, bar: float) -> None:
    device, stream = bench.device, cache.stream
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    with device.use(stream):
        ids = order.to(device.torch_device)
        source = rows.view(torch.float32).to(device.torch_device)
        plan = cache._new_plan(THROUGH, TABLE, ids, planned=False)
        out = plan.out
        left = device.empty((len(ids),), torch.int64)
    works = {
        # the kernel alone, as a step launches it once its pages are there
        "gather": lambda: cache._kernels.gather_lines(plan, left),
        "copy": lambda: out.copy_(source),
        "index_select": lambda: torch.index_select(source, 0, ids, out=out),
    }
    for side, work in works.items():
        with device.use(stream):
            out.view(torch.int32).zero_()
        device_seconds(device, stream, work)
        assert_same_rows(out, rows if side == "copy" else rows[order])
    sides = {side: (lambda work=work: device_seconds(device, stream, work)) for side, work in works.items()}
    seconds = alternate(sides, bench.sizes.repeats)
    bench.figures.ratio(f"{name}, over device copy", seconds["copy"], seconds["gather"], bar=bar)
    bench.figures.ratio(f"{name}, over torch.index_select", seconds["index_select"], seconds["gather"])
    for side, what in (("gather", name), ("copy", f"device copy of {rows.nbytes >> 20} MiB")):
        speed = 2 * rows.nbytes / median(seconds[side]) / 1e9
        bench.figures.add(f"{what}, read + written", speed, "GB/s")


def planning(bench: Bench) -> None:
    device, sizes = bench.device, bench.sizes
    table, rows = make_table(bench.directory, 4096, sizes.table_bytes)
    rng = np.random.default_rng(2)
    drawn = [
        np.unique((len(rows) * rng.random(sizes.ids) ** 4).astype(np.int64)) for _ in range(sizes.minibatches)
    ]
    minibatches = [torch.from_numpy(rng.permutation(ids)) for ids in drawn]
    lines = {TABLE: table.page_count // 4}
    with open_cache(device, table, lines=lines, heats={}, staging_bytes=sizes.staging_bytes) as cache:
        on_device = [ids.to(device.torch_device) for ids in minibatches]
        clock = partial(device_seconds, device, cache.stream)
        by_clock, by_host = _plan(cache, on_device, minibatches, rows, clock)
        stats = cache.stats()[TABLE]
    with open_engine(table.shard_paths, max_read_bytes=table.page_bytes) as engine:
        on_cpu, _ = _plan(
            FeatureCache(engine, [table], lines=lines, heats={}), minibatches, minibatches, rows, wall_seconds
        )
    warm = sizes.minibatches // 3
    pages = float(np.mean([len(ids) for ids in drawn]))
    note = f"{pages:,.0f} pages, {lines[TABLE]:,} lines, {stats['hits'] / stats['pages']:.0%} hits"
    bench.figures.add("planning a minibatch, device time", 1e6 * median(by_clock[warm:]), "us", note=note)
    bench.figures.add("planning a minibatch, host time", 1e6 * median(by_host[warm:]), "us")
    bench.figures.ratio("planning, over the planner on the CPU (one core)", on_cpu[warm:], by_clock[warm:])


def wall_seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _plan(
    cache: FeatureCache | DeviceFeatureCache,
    asked: list[torch.Tensor],
    minibatches: list[torch.Tensor],
    rows: torch.Tensor,
    clock: Callable[[Callable[[], object]], float],
) -> tuple[list[float], list[float]]:
    """Seconds of each minibatch, by the clock and as the cache counts them. asked: ids on its device."""
    seconds, counted = [], []

    def enter_and_plan(step: int) -> None:
        cache.enter(step, {TABLE: asked[step]})
        cache.plan(step)

    def spent() -> float:
        stats = cache.stats()[TABLE]
        return sum(stats[key] for key in ("enter_s", "plan_s", "retire_s"))

    for step, ids in enumerate(minibatches):
        before = spent()
        planned = clock(lambda step=step: enter_and_plan(step))
        features, error = cache.gather(step)
        assert error is None
        assert_same_rows(features[TABLE], rows[ids])
        seconds.append(planned + clock(lambda step=step: cache.retire(step)))
        counted.append(spent() - before)
    return seconds, counted
