"""Does training keep its speed while features are read beside it? Called by gpu.py.

Training is a chain of matrix products on torch's current stream. Beside it a second thread gathers, on
streams of gids, minibatches whose rows are all read from disk.
Each side is measured alone and beside the other. A ratio near 1 means that the two overlap. The first and the
last minibatch of every measurement are compared with the source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from statistics import median

import torch
from gpu_harness import Bench, assert_same_rows, make_table, open_cache
from harness import alternate

from gids.cache.device import DeviceFeatureCache
from gids.cuda import Device
from gids.store import Table

SIZES = {
    "table_bytes": (1 << 30, 1 << 20),
    "ids": (16384, 16),  # rows of a minibatch
    "staging_bytes": (256 << 20, 1 << 20),
    "seconds": (0.8, 0.01),  # of one measurement
    "rounds": (3, 1),
    "side": (4096, 64),  # of the square matrices
}
_ROW_BYTES = 4096
_AHEAD = 2  # planned minibatches
BAR = 0.9

Work = Callable[[bool], int]
"""One minibatch; True to verify it. Returns its rows."""


@contextmanager
def repeated(device: Device, work: Work) -> Iterator[Future[float]]:
    """Repeat work in a thread until the block ends.

    Yields its rows per second, without those of the first minibatch. The first and the last one are
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
    # They take turns, and no line outlives its minibatch: all rows are read from disk.
    lines = {table.name: min(table.page_count, 4 * bench.sizes.ids)}
    options = {"lines": lines, "heats": {}, "staging_bytes": bench.sizes.staging_bytes}
    train = Matrices(bench)
    with open_cache(bench.device, table, **options) as cache:
        _compare(bench, train, _minibatches(bench, cache, table, rows))
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


def _compare(bench: Bench, train: Matrices, work: Work) -> None:
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
    bench.figures.ratio("training beside reads, over alone", *trained, bar=BAR)
    bench.figures.ratio("reads, beside training, over alone", *worked)
    bench.figures.add("reads, alone", median(worked[1]), "rows/s")


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
