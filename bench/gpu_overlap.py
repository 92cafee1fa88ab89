"""Does training keep its speed while features are read and sampled beside it? Called by gpu.py.

Training is a chain of matrix products on torch's current stream. Beside it a second thread works on streams
of gids. It gathers minibatches whose rows are all read from disk (both waits, both transfers), gathers
minibatches whose rows are all in host lines, or samples from a topology in pinned host memory. Each side is
measured alone and beside the other. A ratio near 1 means that the two overlap. The first and the last
minibatch of every measurement are compared with the source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from statistics import median

import numpy as np
import torch
from gpu_harness import Bench, assert_same_minibatch, assert_same_rows, make_table, open_cache
from gpu_sampling import rmat_on
from graphs import seed_order
from harness import alternate

from gids.cache.device import DeviceFeatureCache
from gids.cuda import Device
from gids.sampler import Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Table

SIZES = {
    "table_bytes": (1 << 30, 1 << 20),
    "ids": (16384, 16),  # rows of a minibatch
    "staging_bytes": (256 << 20, 1 << 20),
    "seconds": (0.8, 0.01),  # of one measurement
    "rounds": (3, 1),
    "side": (4096, 64),  # of the square matrices
    "log2_nodes": (21, 8),
    "seeds": (4096, 8),
}
_ROW_BYTES = 4096
_AHEAD = 2  # planned minibatches
BAR = 0.9

Work = Callable[[bool], int]
"""One minibatch; True to verify it. Returns its rows or nodes."""


@contextmanager
def repeated(device: Device, work: Work) -> Iterator[Future[float]]:
    """Repeat work in a thread until the block ends.

    Yields its rows or nodes per second, without those of the first minibatch. The first and the last one are
    verified.
    """
    stop, begun = threading.Event(), threading.Event()

    def run() -> float:
        try:
            with device.use(device.new_stream()):
                work(True)
                begun.set()
                done, since = 0, time.perf_counter()
                while not done or not stop.is_set():
                    done += work(False)
                rate = done / (time.perf_counter() - since)
                work(True)
                return rate
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        rate = pool.submit(run)
        begun.wait()
        try:
            yield rate
        finally:
            stop.set()


def overlap(bench: Bench) -> None:
    table, rows = make_table(bench.directory, _ROW_BYTES, bench.sizes.table_bytes)
    one_line, all_heats = {table.name: 1}, {table.name: np.ones(table.page_count, np.uint8)}
    in_host = {"lines": one_line, "host_lines": {table.name: table.page_count - 1}, "heats": all_heats}
    # They take turns, and no line outlives its minibatch: all rows are read from disk.
    reads = {"lines": {table.name: min(table.page_count, 4 * bench.sizes.ids)}, "heats": {}}
    caches = {
        "reads, wait stream": reads,
        "reads, transfer copy": {**reads, "transfer": "copy"},
        "reads, wait warp": {**reads, "wait": "warp"},
        "lines in host memory": {**in_host, "host_policy": "static"},
    }
    train = Matrices(bench)
    for name, options in caches.items():
        bar = BAR if name == "reads, wait stream" else None
        with open_cache(bench.device, table, staging_bytes=bench.sizes.staging_bytes, **options) as cache:
            _compare(bench, train, name, _minibatches(bench, cache, table, rows), "rows/s", bar)
    with _sampling(bench) as work:
        _compare(bench, train, "sampling", work, "nodes/s", None)
    assert torch.isfinite(train.state).all(), "training went wrong"


class Matrices:
    """A training: a chain of matrix products on the current stream. Calling it returns steps per second."""

    def __init__(self, bench: Bench) -> None:
        side = bench.sizes.side
        self._stream, self._seconds = bench.device.current_stream(), bench.sizes.seconds
        self._factor = torch.full((side, side), 1.0 / side, device=bench.device.torch_device)
        self.state, self._product = torch.ones_like(self._factor), torch.empty_like(self._factor)
        self()

    def __call__(self) -> float:
        steps, begun = 0, time.perf_counter()
        while steps == 0 or time.perf_counter() - begun < self._seconds:
            for _ in range(8):
                torch.mm(self._factor, self.state, out=self._product)
                torch.mul(self._product, 1.0, out=self.state)
            self._stream.synchronize()
            steps += 8
        return steps / (time.perf_counter() - begun)


def _compare(bench: Bench, train: Matrices, name: str, work: Work, unit: str, bar: float | None) -> None:
    def alone() -> tuple[float, float]:
        with repeated(bench.device, work) as rate:
            time.sleep(bench.sizes.seconds)
        return 0.0, rate.result()

    def together() -> tuple[float, float]:
        with repeated(bench.device, work) as rate:
            trained = train()
        return trained, rate.result()

    sides = {"training": lambda: (train(), 0.0), "alone": alone, "together": together}
    rates = alternate(sides, bench.sizes.rounds)
    trained = [[steps for steps, _ in rates[side]] for side in ("together", "training")]
    worked = [[rate for _, rate in rates[side]] for side in ("together", "alone")]
    bench.figures.ratio(f"training beside {name}, over alone", *trained, bar=bar)
    bench.figures.ratio(f"{name}, beside training, over alone", *worked)
    bench.figures.add(f"{name}, alone", median(worked[1]), unit)


def _minibatches(bench: Bench, cache: DeviceFeatureCache, table: Table, rows: torch.Tensor) -> Work:
    def draw() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        while True:
            yield from torch.randperm(len(rows), generator=generator).split(bench.sizes.ids)

    drawn, steps, ahead = draw(), count(), deque[tuple[int, torch.Tensor]]()

    def work(verify: bool) -> int:
        while len(ahead) < _AHEAD:
            step, ids = next(steps), next(drawn)
            ahead.append((step, ids))
            cache.enter(step, {table.name: ids.to(bench.device.torch_device)})
            cache.plan(step)
        step, ids = ahead.popleft()
        features, error = cache.gather(step)
        if error is not None:
            raise error
        cache.retire(step)
        if verify:
            assert_same_rows(features[table.name], rows[ids])
        else:
            bench.device.current_stream().synchronize()  # as a consumer that trains on it
        return len(ids)

    return work


@contextmanager
def _sampling(bench: Bench) -> Iterator[Work]:
    graph = rmat_on(bench, seed=4, degree=16)
    sampler, seeds, steps = Neighbor([10, 5]), torch.from_numpy(seed_order(graph, 5)), count(1)
    with closing(PinnedGraph(graph, bench.device, topology_on="host")) as pinned:
        on_device, on_host = Topology(pinned), Topology(graph)

        def work(verify: bool) -> int:
            step, size = next(steps), bench.sizes.seeds
            chosen = seeds[torch.arange(step * size, (step + 1) * size) % len(seeds)]
            minibatch = sampler.sample(on_device, chosen, seed=6, step=step)
            if verify:
                assert_same_minibatch(sampler.sample(on_host, chosen, seed=6, step=step), minibatch)
            bench.device.current_stream().synchronize()
            return len(minibatch.input_nodes)

        yield work
