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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Figures
from gpu_cache import make_table
from gpu_sampling import rmat, same_minibatch
from harness import alternate, median_ratio

from gids.cache.device import DeviceFeatureCache
from gids.cuda import Device
from gids.io import open_engine
from gids.sampler import Neighbor, Topology
from gids.sampler.device import PinnedGraph
from gids.store import Table

_ROW_BYTES = 4096
_AHEAD = 2  # planned minibatches
BAR = 0.9


@dataclass(frozen=True)
class OverlapSizes:
    """ids: rows of a minibatch. seconds: of one measurement. side: of the square matrices."""

    table_bytes: int = 1 << 30
    ids: int = 16384
    staging_bytes: int = 256 << 20
    seconds: float = 0.8
    rounds: int = 3
    side: int = 4096
    log2_nodes: int = 21
    seeds: int = 4096


SMALL = OverlapSizes(
    table_bytes=1 << 20,
    ids=16,
    staging_bytes=1 << 20,
    seconds=0.01,
    rounds=1,
    side=64,
    log2_nodes=8,
    seeds=8,
)

Work = Callable[[bool], int]
"""One minibatch; True to verify it. Returns its rows or nodes."""


class Beside:
    """Work that a thread repeats until it is stopped."""

    def __init__(self, device: Device, work: Work) -> None:
        self._device, self._work = device, work
        self._stop, self._begun = threading.Event(), threading.Event()
        self._rates: list[float] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Beside:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._errors:
            raise self._errors[0]

    @property
    def rate(self) -> float:
        """Rows or nodes per second, of what was done after the first minibatch."""
        return self._rates[0]

    def _run(self) -> None:
        try:
            with self._device.use(self._device.new_stream()):
                self._work(True)
                self._begun.set()
                done, begun = 0, time.perf_counter()
                while not done or not self._stop.is_set():
                    done += self._work(False)
                self._rates.append(done / (time.perf_counter() - begun))
                self._work(True)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._begun.set()


def overlap(device: Device, directory: Path, sizes: OverlapSizes, figures: Figures) -> None:
    table, rows = make_table(directory, _ROW_BYTES, sizes.table_bytes)
    stream = device.current_stream()
    factor = torch.full((sizes.side, sizes.side), 1.0 / sizes.side, device=device.torch_device)
    state = torch.ones_like(factor)

    def train() -> float:
        """Steps per second."""
        steps, begun = 0, time.perf_counter()
        while steps == 0 or time.perf_counter() - begun < sizes.seconds:
            for _ in range(8):
                torch.mm(factor, state, out=product)
                torch.mul(product, 1.0, out=state)
            stream.synchronize()
            steps += 8
        return steps / (time.perf_counter() - begun)

    product = torch.empty_like(factor)
    train()
    gather = (device, table, rows, sizes)
    for name, unit, bar, opened in (
        ("reads, wait stream", "rows/s", BAR, lambda stack: _reads(*gather, stack)),
        ("reads, transfer copy", "rows/s", None, lambda stack: _reads(*gather, stack, transfer="copy")),
        ("reads, wait warp", "rows/s", None, lambda stack: _reads(*gather, stack, wait="warp")),
        ("lines in host memory", "rows/s", None, lambda stack: _host_lines(*gather, stack)),
        ("sampling", "nodes/s", None, lambda stack: _sampling(device, sizes, stack)),
    ):
        with ExitStack() as stack:
            work = opened(stack)

            def alone() -> float:
                with Beside(device, work) as beside:  # noqa: B023
                    time.sleep(sizes.seconds)
                return beside.rate

            def both() -> tuple[float, float]:
                with Beside(device, work) as beside:  # noqa: B023
                    trained = train()
                return trained, beside.rate

            sides: dict[str, Callable[[], tuple[float, float]]] = {
                "training": lambda: (train(), 0.0),
                "alone": lambda: (0.0, alone()),
                "both": both,
            }
            found = alternate(sides, sizes.rounds)
        trained = [[pair[0] for pair in found[side]] for side in ("both", "training")]
        worked = [[pair[1] for pair in found[side]] for side in ("both", "alone")]
        figures.add(f"training beside {name}, over alone", median_ratio(*trained), "x", bar=bar)
        figures.add(f"{name}, beside training, over alone", median_ratio(*worked), "x")
        figures.add(f"{name}, alone", median(worked[1]), unit)
    assert torch.isfinite(state).all(), "training went wrong"


def _reads(
    device: Device, table: Table, rows: torch.Tensor, sizes: OverlapSizes, stack: ExitStack, **options: Any
) -> Work:
    """Minibatches whose rows are read from disk: they take turns, and no line outlives its minibatch."""
    lines = min(table.page_count, 4 * sizes.ids)
    cache = _open_cache(device, table, sizes, stack, lines={table.name: lines}, heats={}, **options)
    return _minibatches(device, cache, table, rows, sizes)


def _host_lines(
    device: Device, table: Table, rows: torch.Tensor, sizes: OverlapSizes, stack: ExitStack
) -> Work:
    cache = _open_cache(
        device,
        table,
        sizes,
        stack,
        lines={table.name: 1},
        host_lines={table.name: table.page_count - 1},
        heats={table.name: np.ones(table.page_count, np.uint8)},
        host_policy="static",
    )
    return _minibatches(device, cache, table, rows, sizes)


def _open_cache(
    device: Device, table: Table, sizes: OverlapSizes, stack: ExitStack, **options: Any
) -> DeviceFeatureCache:
    """The stack closes it, and then its engine."""
    engine = stack.enter_context(open_engine(table.shard_paths, max_read_bytes=table.page_bytes))
    cache = DeviceFeatureCache(device, engine, [table], staging_bytes=sizes.staging_bytes, **options)
    return stack.enter_context(closing(cache))


def _minibatches(
    device: Device, cache: DeviceFeatureCache, table: Table, rows: torch.Tensor, sizes: OverlapSizes
) -> Work:
    def drawn() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        while True:
            yield from torch.randperm(len(rows), generator=generator).split(sizes.ids)

    source, ahead, planned = drawn(), {}, 0

    def plan() -> None:
        nonlocal planned
        ids = next(source)
        ahead[planned] = ids
        cache.enter(planned, {table.name: ids.to(device.torch_device)})
        cache.plan(planned)
        planned += 1

    def work(verify: bool) -> int:
        while len(ahead) < _AHEAD:
            plan()
        step = min(ahead)
        features, error = cache.gather(step)
        if error is not None:
            raise error
        cache.retire(step)
        ids, found = ahead.pop(step), features[table.name]
        if verify:
            assert torch.equal(found.view(torch.int32).cpu(), rows[ids]), "other rows than the source's"
        else:
            device.current_stream().synchronize()  # as a consumer that trains on it
        return len(ids)

    return work


def _sampling(device: Device, sizes: OverlapSizes, stack: ExitStack) -> Work:
    graph = rmat(device.torch_device, sizes.log2_nodes, 16, seed=4)
    pinned = stack.enter_context(closing(PinnedGraph(graph, device, topology_on="host")))
    sampler, on_device, on_host = Neighbor([10, 5]), Topology(pinned), Topology(graph)
    seeds = torch.from_numpy(np.random.default_rng(5).permutation(np.flatnonzero(np.diff(graph.indptr))))
    step = 0

    def work(verify: bool) -> int:
        nonlocal step
        step += 1
        chosen = seeds[torch.arange(step * sizes.seeds, (step + 1) * sizes.seeds) % len(seeds)]
        found = sampler.sample(on_device, chosen, seed=6, step=step)
        if verify:
            on_cpu = sampler.sample(on_host, chosen, seed=6, step=step)
            assert same_minibatch(on_cpu, found), "CPU and GPU sample different minibatches"
        device.current_stream().synchronize()
        return len(found.input_nodes)

    return work
