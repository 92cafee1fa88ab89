"""Does the cache in device memory gather as fast as the device copies, and what does planning cost?

Called by gpu.py. gather: rows that are all in lines, in random order, compared with a copy of the same number
of bytes within device memory, and with torch.index_select on the device. Kernels only, by the device's clock.

planning: enter + plan + retire of minibatches of skewed ids with a hit ratio of about one half, including the
posting of their reads, by the device's clock and the host's; compared with the planner on the CPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from device_timer import device_seconds
from figures import Figures
from harness import alternate, median_ratio

from gids.cache import FeatureCache
from gids.cache.device import DeviceFeatureCache
from gids.cache.device.counters import THROUGH
from gids.cuda import Device
from gids.io import Engine, open_engine
from gids.io.device.extents import open_extent_reader
from gids.store import FeatureStore, Table
from gids.store.names import NODE
from gids.write import DatasetWriter

_TABLE = f"{NODE}.feat"


@dataclass(frozen=True)
class CacheSizes:
    """table_bytes: of features, and of each copy that is compared. ids: drawn for a minibatch to plan."""

    table_bytes: int = 1 << 30
    repeats: int = 9
    ids: int = 65536
    minibatches: int = 24
    staging_bytes: int = 256 << 20


SMALL = CacheSizes(table_bytes=256 << 10, repeats=1, ids=200, minibatches=3, staging_bytes=1 << 20)


def make_table(directory: Path, row_bytes: int, total_bytes: int) -> tuple[Table, torch.Tensor]:
    """A dataset of rows that all differ: its table, and the rows as int32[n, words]."""
    words = torch.arange(total_bytes // 4, dtype=torch.int32).view(-1, row_bytes // 4)
    path = directory / f"rows-{row_bytes}.gids"
    with DatasetWriter(path, workers=8) as writer:
        writer.write_table("node", NODE, "feat", words.view(torch.float32))
    return FeatureStore(path).table(_TABLE), words


@contextlib.contextmanager
def open_cache(
    device: Device, table: Table, sizes: CacheSizes, *, lines: int, preload: bool
) -> Iterator[tuple[DeviceFeatureCache, Engine]]:
    heat = {table.name: np.ones(table.page_count, np.uint8)} if preload else {}
    with open_engine(table.shard_paths, max_read_bytes=table.page_bytes) as engine:
        with contextlib.closing(open_extent_reader(device, engine, table.shard_paths)) as reader:
            cache = DeviceFeatureCache(
                device,
                engine,
                [table],
                lines={table.name: lines},
                heats=heat,
                reader=reader,
                staging_bytes=sizes.staging_bytes,
            )
        with contextlib.closing(cache):
            yield cache, engine


def gather(device: Device, directory: Path, sizes: CacheSizes, figures: Figures) -> None:
    for row_bytes, bar in ((4096, 0.8), (512, 0.5)):
        table, rows = make_table(directory, row_bytes, sizes.table_bytes)
        with open_cache(device, table, sizes, lines=table.page_count, preload=True) as (cache, _):
            _gather(device, cache, rows, row_bytes, bar, sizes, figures)


def _gather(
    device: Device,
    cache: DeviceFeatureCache,
    rows: torch.Tensor,
    row_bytes: int,
    bar: float,
    sizes: CacheSizes,
    figures: Figures,
) -> None:
    stream, state = cache.stream, cache._states[_TABLE]
    counters = cache._counters.of(THROUGH, _TABLE)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(rows), generator=generator)
    with device.use(stream):
        ids = order.to(device.torch_device)
        source = rows.view(torch.float32).to(device.torch_device)
        out = torch.empty_like(source)
        left = device.empty((len(ids),), torch.int64)

    def ours() -> None:  # the kernel alone, as a step launches it once its pages are there
        cache._kernels.gather_lines(state, counters, None, ids, out, left)

    sides = {
        "gather": ours,
        "copy": lambda: out.copy_(source),
        "index_select": lambda: torch.index_select(source, 0, ids, out=out),
    }
    for work in sides.values():
        with device.use(stream):
            out.view(torch.int32).zero_()
        device_seconds(device, stream, work)
        expected = rows if work is sides["copy"] else rows[order]
        assert torch.equal(out.view(torch.int32).cpu(), expected), "other rows than the source's"
    timed = {name: (lambda work=work: device_seconds(device, stream, work)) for name, work in sides.items()}  # type: ignore[misc]
    seconds = alternate(timed, sizes.repeats)
    moved = 2 * rows.nbytes
    speed = moved / median(seconds["copy"]) / 1e9
    name = f"gather of {row_bytes} B rows, all hits"
    figures.add(f"{name}, over device copy", median_ratio(seconds["copy"], seconds["gather"]), "x", bar=bar)
    ratio = median_ratio(seconds["index_select"], seconds["gather"])
    figures.add(f"{name}, over torch.index_select", ratio, "x")
    figures.add(f"device copy of {rows.nbytes >> 20} MiB, read + written", speed, "GB/s")


def planning(device: Device, directory: Path, sizes: CacheSizes, figures: Figures) -> None:
    table, rows = make_table(directory, 4096, sizes.table_bytes)
    rng = np.random.default_rng(2)
    drawn = [
        np.unique((len(rows) * rng.random(sizes.ids) ** 4).astype(np.int64)) for _ in range(sizes.minibatches)
    ]
    minibatches = [torch.from_numpy(rng.permutation(ids)) for ids in drawn]
    on_device = [ids.to(device.torch_device) for ids in minibatches]
    lines = table.page_count // 4
    by_clock, by_host = [], []
    with open_cache(device, table, sizes, lines=lines, preload=False) as (cache, _):
        for step, ids in enumerate(on_device):

            def enter_and_plan(step: int = step, ids: torch.Tensor = ids) -> None:
                cache.enter(step, {_TABLE: ids})
                cache.plan(step)

            before = cache.stats()[_TABLE]
            spent = device_seconds(device, cache.stream, enter_and_plan)
            features, error = cache.gather(step)
            assert error is None
            assert torch.equal(features[_TABLE].view(torch.int32).cpu(), rows[minibatches[step]])
            spent += device_seconds(device, cache.stream, lambda step=step: cache.retire(step))  # type: ignore[misc]
            by_clock.append(spent)
            after = cache.stats()[_TABLE]
            by_host.append(sum(after[key] - before[key] for key in ("enter_s", "plan_s", "retire_s")))
        hits = cache.stats()[_TABLE]["hits"] / cache.stats()[_TABLE]["pages"]
    on_cpu = _plan_on_cpu(table, minibatches, lines, rows)
    warm = sizes.minibatches // 3
    pages = float(np.mean([len(ids) for ids in drawn]))
    note = f"{pages:,.0f} pages, {lines:,} lines, {hits:.0%} hits"
    gpu_us, host_us = 1e6 * median(by_clock[warm:]), 1e6 * median(by_host[warm:])
    figures.add("planning a minibatch, device time", gpu_us, "us", note=note)
    figures.add("planning a minibatch, host time", host_us, "us")
    ratio = median_ratio(on_cpu[warm:], by_clock[warm:])
    figures.add("planning, over the planner on the CPU (one core)", ratio, "x")


def _plan_on_cpu(
    table: Table, minibatches: list[torch.Tensor], lines: int, rows: torch.Tensor
) -> list[float]:
    seconds = []
    with open_engine(table.shard_paths, max_read_bytes=table.page_bytes) as engine:
        cache = FeatureCache(engine, [table], lines={table.name: lines}, heats={})
        for step, ids in enumerate(minibatches):
            begun = time.perf_counter()
            cache.enter(step, {_TABLE: ids})
            cache.plan(step)
            spent = time.perf_counter() - begun
            features, error = cache.gather(step)
            assert error is None
            assert torch.equal(features[_TABLE].view(torch.int32), rows[ids])
            begun = time.perf_counter()
            cache.retire(step)
            seconds.append(spent + time.perf_counter() - begun)
    return seconds
