"""How fast does a GPU get rows if the disk is no limit? Called by gpu.py.

The files are in the page cache, a stand-in for an array of fast SSDs, and io_uring reads them without
O_DIRECT: a read costs the copy. (tmpfs is no stand-in: the kernel hands each of its reads to another thread.)
Rows of 4 KiB and of 512 B; a NodeLoader with memory for a quarter of them; GraphSAGE as the training.

Sides: cuda with default options; cuda with the number of rings and the depth set by hand; cuda with all other
pages in pinned host memory; cpu, whose minibatches are moved to the GPU; cpu with pin_memory=True, whose
copies overlap with training; and with gids' sampler on the CPU, torch.index_select of features in memory and
copies out of a map of the file by 16 threads, both into two pinned buffers that a copy engine empties.

All have the same seeds, sampler, model and initial weights. Each side is measured once, without and with
training, after a warm-up in which rings may be added and memory is pinned. The warm-up compares every value
of every row with a formula of the node's id, on the GPU; the measurement compares some rows of every
minibatch. The host does not wait for each minibatch. A side that fails costs its own figures. No side begins
after the time is up.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from gpu_array_data import CLASSES, THREADS, FormulaData, wrong_values
from gpu_harness import TABLE, Bench
from sage import Training

import gids
import gids.io
from gids import NodeLoader
from gids.bench.features import map_array
from gids.cuda import Device
from gids.cuda.device import Event
from gids.sampler import Minibatch

SIZES = {
    "nodes": ({4096: 1 << 21, 512: 1 << 23}, {4096: 1 << 10, 512: 1 << 12}),  # by bytes of a row
    "degree": (12, 6),
    "batch_size": (1024, 4),
    "fanouts": ((10, 10, 10), (3, 2)),
    "hidden": (256, 8),
    "minibatches": (400, 64),
    "cache_share": (0.25, 0.25),  # of the rows
    "staging_bytes": (256 << 20, 256 << 10),  # the default, and twice as much by hand
    "rings": (12, 1),  # by hand, at most the cores but 3
    "ring_depth": (256, 32),
    "verified_rows": (1 << 16, 64),  # compared at a time; of each measured minibatch
    "warm": (4, 1),  # minibatches at least
    "warm_s": (2.0, 0.02),
    "measured_s": ({"rows": 1.8, "training": 1.5}, {"rows": 0.02, "training": 0.02}),
    "side_s": (8.0, 60.0),  # after its first minibatch a side ends; with less left, none begins
    "data_s": (25.0, 60.0),  # with less left, no dataset is written
    "all_s": (108.0, 600.0),
}
_FEWEST = 2  # minibatches of a measurement
_CACHED = "files in the page cache, a stand-in for an array"
CUDA = f"cuda, default options, {_CACHED}"
BY_HAND = f"cuda, rings and depth by hand, {_CACHED}"
PINNED_HOST = f"cuda, the other pages in pinned host memory, {_CACHED}"
CPU = f"cpu, then moved, {_CACHED}"
CPU_PINNED = f"cpu with pin_memory, then copied, {_CACHED}"
IN_MEMORY = "torch, features in memory, index_select into pinned buffers"
MAPPED = f"map of the file, {THREADS} threads into pinned buffers, {_CACHED}"
SIDES = {4096: (CUDA, BY_HAND, IN_MEMORY, CPU, CPU_PINNED, PINNED_HOST, MAPPED)}
SIDES[512] = (CUDA, BY_HAND, IN_MEMORY, CPU)
RATIOS = {  # name: (above, below, the target by bytes of a row)
    "cuda by default over rings by hand": (CUDA, BY_HAND, {4096: 0.9, 512: 0.9}),
    "cuda by default over torch, features in memory": (CUDA, IN_MEMORY, {4096: 2.0}),
    "cpu with pin_memory over cpu": (CPU_PINNED, CPU, {4096: 1.8}),
}
_MOST_MAIN_MS = 15.0

Batches = Iterator[tuple[Minibatch, torch.Tensor]]
"""Minibatches and their rows, float32[n, dim], on the device."""
Stats = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Measured:
    """What a side did in a while. main_s: processor time of the training's thread."""

    rows: int
    minibatches: int
    seconds: float
    main_s: float

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def main_ms(self) -> float:
        return 1e3 * self.main_s / self.minibatches

    def __str__(self) -> str:
        each = f"{1e3 * self.seconds / self.minibatches:.1f} ms a minibatch"
        return f"{each}, the main thread's CPU {self.main_ms:.1f} ms"


def array(bench: Bench) -> None:
    ends = time.perf_counter() + bench.sizes.all_s
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    failed: list[str] = []
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for row_bytes in SIDES:
                if time.perf_counter() + bench.sizes.data_s > ends:
                    print(f"rows of {row_bytes} B: not begun, the time is up", flush=True)
                    continue
                data = FormulaData(bench.directory, row_bytes, bench.sizes, threads)
                file_system = gids.io.probe(data.table.shard_paths[0])["file_system"]
                print(f"{data.nodes:,} rows of {row_bytes} B on {file_system}", flush=True)
                failed += _compare(bench, Comparison(bench, data, threads), row_bytes, ends)
                del data
    finally:
        torch.set_float32_matmul_precision(precision)
    assert not failed, f"failed: {'; '.join(failed)}"


def _compare(bench: Bench, comparison: Comparison, row_bytes: int, ends: float) -> list[str]:
    """Measure all sides of a size of rows. Returns the names of those that failed."""
    label = f"rows of {row_bytes // 1024} KiB" if row_bytes >= 1024 else f"rows of {row_bytes} B"
    results: dict[str, dict[str, Measured]] = {}
    failed = []
    for side in SIDES[row_bytes]:
        if time.perf_counter() + bench.sizes.side_s > ends:
            print(f"{label}, {side}: not begun, the time is up", flush=True)
            continue
        try:
            result, note = comparison.measure(side)
        except Exception:  # a side without memory must not cost the others
            traceback.print_exc()
            failed.append(f"{label}, {side}")
            continue
        results[side] = result
        training = f"{result['training'].rate:,.0f} with training; " if "training" in result else ""
        bench.figures.add(f"{label}, {side}", result["rows"].rate, "rows/s", note=training + note)
        if side == CUDA:
            name = f"{label}, cuda by default: processor time of the main thread"
            bench.figures.add(name, result["rows"].main_ms, "ms/minibatch", most=_MOST_MAIN_MS)
        _add_ratios(bench, results, side, label, row_bytes)
    return failed


def _add_ratios(
    bench: Bench, results: dict[str, dict[str, Measured]], last: str, label: str, row_bytes: int
) -> None:
    """Add the ratios for which the side that was measured last was missing."""
    for name, (above, below, targets) in RATIOS.items():
        if last in (above, below) and above in results and below in results:
            same = [way for way in results[above] if way in results[below]]
            ratios = sorted(results[above][way].rate / results[below][way].rate for way in same)
            span, note = (ratios[0], ratios[-1]), "without and with training"
            bench.figures.add(f"{label}, {name}", span, "x", bar=targets.get(row_bytes), note=note)


class PinnedBuffer:
    """Pinned memory that holds the rows of a minibatch on their way to the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._values = torch.empty(0)
        self._copied: Event | None = None

    def take(self, count: int, dim: int) -> torch.Tensor:
        """float32[count, dim], as soon as the copy before is done."""
        if self._copied is not None:
            self._copied.synchronize()
        if count * dim > len(self._values):
            self._values = torch.empty(count * dim + count * dim // 8, pin_memory=True)
        return self._values[: count * dim].view(count, dim)

    def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows on the device. Does not block."""
        moved = rows.to(self._device.torch_device, non_blocking=True, copy=True)
        self._copied = self._device.record_current()
        return moved


class Comparison:
    """The sides for one size of rows; each measure() is one run."""

    def __init__(self, bench: Bench, data: FormulaData, threads: ThreadPoolExecutor) -> None:
        self._device, self._sizes, self._data, self._threads = bench.device, bench.sizes, data, threads
        self._to = bench.device.torch_device
        count = min(data.nodes, bench.sizes.batch_size * bench.sizes.minibatches)
        seeds = np.random.default_rng(5).permutation(data.nodes)[:count]
        self._seeds = torch.from_numpy(seeds.astype(np.int64))
        staging = bench.sizes.staging_bytes
        rings = max(1, min(bench.sizes.rings, len(os.sched_getaffinity(0)) - 3))
        by_hand = {"io_threads": rings, "queue_depth": rings * bench.sizes.ring_depth, "staging": 2 * staging}
        memory = staging + data.rows.nbytes
        self._sides: dict[str, Callable[[], AbstractContextManager[tuple[Batches, Stats]]]] = {
            CUDA: lambda: self._loader("cuda"),
            BY_HAND: lambda: self._loader("cuda", **by_hand),
            PINNED_HOST: lambda: self._loader("cuda", memory=memory),
            CPU: lambda: self._loader("cpu"),
            CPU_PINNED: lambda: self._loader("cpu", pin_memory=True),
            IN_MEMORY: lambda: self._gathered(self._from_memory),
            MAPPED: lambda: self._gathered(self._mapped()),
        }

    def measure(self, side: str) -> tuple[dict[str, Measured], str]:
        """({"rows": without training, "training": with it, if there was time}, a note about both).

        Raises AssertionError for a wrong row.
        """
        sizes = self._sizes
        dims = [self._data.table.shape[0], *[sizes.hidden] * (len(sizes.fanouts) - 1), CLASSES]
        training = Training(dims, seed=1, rate=1e-3, device=self._to)
        wrong = torch.zeros((), dtype=torch.int64, device=self._to)
        results: dict[str, Measured] = {}
        with self._sides[side]() as (batches, stats):
            ends = self._warm_up(batches, training, wrong) + sizes.side_s
            for way, seconds in sizes.measured_s.items():
                until = min(time.perf_counter() + seconds, ends)
                step = training if way == "training" else None
                if (measured := self._measure(batches, step, wrong, until)).minibatches >= _FEWEST:
                    results[way] = measured
            assert int(wrong) == 0, f"{int(wrong)} values are wrong"
            assert "rows" in results, "too few minibatches to measure"
            found = stats()
        note = f"{results['rows']}, {results['rows'].rows // results['rows'].minibatches:,} rows"
        if found.get("pages"):
            note += f"; hits {found['hit_ratio']:.2f}; rings at the end: {found['engine']['threads']}"
        return results, note

    def _warm_up(self, batches: Batches, training: Training, wrong: torch.Tensor) -> float:
        """Take minibatches, and compare all values. Returns the time of the first one."""
        times: list[float] = []
        for m, rows in batches:
            for begin in range(0, len(rows), self._sizes.verified_rows):
                part = slice(begin, begin + self._sizes.verified_rows)
                wrong += wrong_values(m.input_nodes[part], rows[part])
            training.step(m.blocks, rows, m.labels)
            self._device.record_current().synchronize()
            times.append(time.perf_counter())
            seconds = times[-1] - times[0]
            enough = len(times) >= self._sizes.warm and seconds > self._sizes.warm_s
            if enough or seconds > self._sizes.side_s / 2:
                break
        return times[0]

    def _measure(
        self, batches: Batches, training: Training | None, wrong: torch.Tensor, until: float
    ) -> Measured:
        """Take minibatches until this time, and at least a few. Compares a part of each one."""
        rows_taken = count = 0
        verified = self._sizes.verified_rows
        begun, main = time.perf_counter(), time.thread_time()
        for m, rows in batches:
            begin = count * verified % len(rows)
            wrong += wrong_values(m.input_nodes[begin:][:verified], rows[begin:][:verified])
            if training is not None:
                training.step(m.blocks, rows, m.labels)
            rows_taken, count = rows_taken + len(rows), count + 1
            del m, rows
            if count >= _FEWEST and time.perf_counter() > until:
                break
        self._device.record_current().synchronize()
        return Measured(rows_taken, count, time.perf_counter() - begun, time.thread_time() - main)

    @contextmanager
    def _loader(
        self, device: str, *, memory: int | None = None, pin_memory: bool = False, **by_hand: int
    ) -> Iterator[tuple[Batches, Stats]]:
        tuning = {"cache": int(self._data.rows.nbytes * self._sizes.cache_share), "direct": False}
        tuning |= {"staging": self._sizes.staging_bytes, **by_hand}
        source = gids.open(self._data.path, reads="random", memory=memory, tuning=gids.Tuning(**tuning))
        options = {"batch_size": self._sizes.batch_size, "seed": 1, "device": device, "tables": [TABLE]}
        made = NodeLoader(source, self._seeds, self._sizes.fanouts, **options, pin_memory=pin_memory)

        def on_device() -> Batches:
            for m in loader:
                moved = m if device == "cuda" else m.to(self._to, non_blocking=pin_memory)
                yield moved, moved.features[TABLE]

        with source, closing(made) as loader, closing(on_device()) as batches:
            yield batches, loader.stats

    @contextmanager
    def _gathered(
        self, gather: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> Iterator[tuple[Batches, Stats]]:
        """gather(ids, out) brings rows into pinned memory. The same minibatches, sampled on the CPU."""
        source = gids.open(self._data.path)
        options = {"batch_size": self._sizes.batch_size, "seed": 1, "tables": []}
        buffers = cycle([PinnedBuffer(self._device) for _ in range(2)])

        def on_device() -> Batches:
            for m in sampler:
                buffer = next(buffers)
                rows = buffer.take(len(m.input_nodes), self._data.rows.shape[1])
                gather(m.input_nodes, rows)
                yield m.to(self._to), buffer.copy(rows)

        made = NodeLoader(source, self._seeds, self._sizes.fanouts, **options)
        with source, closing(made) as sampler, closing(on_device()) as batches:
            yield batches, dict

    def _from_memory(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self._data.rows, 0, ids, out=out)

    def _mapped(self) -> Callable[[torch.Tensor, torch.Tensor], object]:
        mapped = map_array(self._data.table, random_access=False).numpy()

        def gather(ids: torch.Tensor, out: torch.Tensor) -> None:
            numbers, rows = (np.array_split(whole.numpy(), THREADS) for whole in (ids, out))
            list(self._threads.map(lambda i, to: np.take(mapped, i, 0, out=to, mode="clip"), numbers, rows))

        return gather
