"""How fast does GraphSAGE train on a GPU from features on disk, and where does the time go? Called by gpu.py.

A synthetic graph with features of several times the cache; plain PyTorch. Sides: gids.NodeLoader with its
cache in device memory; the same loader with its cache in
host memory, moving features to the device; and torch indexing of the memory-mapped table, moved to the
device, with the same sampler, once with the read-ahead that Linux has by default and once with MADV_RANDOM.
All have the same minibatches, model and initial weights. Each side waits for every loss; one more run of the
first side does not, like a training that looks at its loss now and then.

The page cache is dropped before each run. For the mapped sides, a control group limits it and other memory to
the size of the caches of gids and a gigabyte, if the user may make one. Each side is stopped after a while
and compared by rows per second, without its first minibatches; each run is reported when it ends. Before
that, minibatches of the loaders are compared bit for bit with each other and with the source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from gpu_harness import TABLE, Bench, assert_same_minibatch, assert_same_rows, open_loader
from graphs import make_dataset
from harness import alternate
from sage import Training

import gids.io
from gids import NodeLoader
from gids.bench.features import map_array
from gids.bench.isolation import MemoryGroup
from gids.convert.synthetic import GraphSpec
from gids.sampler import Minibatch, Neighbor, Topology
from gids.store.names import NODE, RELATION

SIZES = {
    "feature_bytes": (4 << 30, 2 << 20),
    "dim": (1024, 256),
    "degree": (16.0, 6.0),
    "batch_size": (256, 8),
    "fanouts": ((10, 5, 5), (3, 2)),
    "minibatches": (60, 6),
    "warm": (4, 1),  # minibatches not counted; fewer if they take longer than most_s
    "most_s": (3.0, 3.0),  # after which a side is stopped
    "hidden": (128, 8),
    "cache_share": (0.25, 0.25),  # of the features
    "rounds": (1, 1),
    "window": (16, 3),
    "staging_bytes": (256 << 20, 1 << 20),
}
_CLASSES = 16
_COMPARED = 4  # minibatches of each device loader that are compared with the CPU's
Batches = Iterator[tuple[Minibatch, torch.Tensor]]


@dataclass
class Run:
    """A run of one side, without its warm-up.

    seconds: by stage. host_s: processor time that the training's thread takes in next().
    """

    rows: int
    minibatches: int
    total_s: float
    seconds: dict[str, float]
    host_s: float
    stats: dict[str, Any]

    @property
    def note(self) -> str:
        stages = ", ".join(f"{what} {1e3 * s / self.minibatches:.1f} ms" for what, s in self.seconds.items())
        rows = self.rows // self.minibatches
        return f"{stages} a minibatch of {rows:,} rows; {self.minibatches} minibatches"


def training(bench: Bench) -> None:
    compare = Comparison(bench)
    same = "minibatches of cpu and cuda are the same, bit for bit"
    bench.figures.add(same, compare.identical(), "minibatches")
    sides = {
        "cuda": compare.on_device,
        "cuda, losses not waited for": lambda: compare.on_device(wait=False),
        "cpu, moved": compare.on_host,
        "mapped, moved": compare.mapped,
        "mapped with MADV_RANDOM, moved": lambda: compare.mapped(random=True),
    }

    def told(name: str) -> Run:
        run = sides[name]()
        bench.figures.add(f"training, a run of {name}", run.rows / run.total_s, "rows/s", note=run.note)
        return run

    runs = alternate({name: partial(told, name) for name in sides}, bench.sizes.rounds)
    rates = {name: [run.rows / run.total_s for run in side] for name, side in runs.items()}
    for name in ("cpu, moved", "mapped, moved", "mapped with MADV_RANDOM, moved"):
        bench.figures.ratio(f"training rows/s, cuda over {name}", rates["cuda"], rates[name])
    unwaited = rates["cuda, losses not waited for"]
    bench.figures.ratio("training rows/s, losses not waited for", unwaited, rates["cuda"])
    for name, side in runs.items():
        middle = rates[name].index(median_low(rates[name]))
        bench.figures.add(f"training, {name}", rates[name][middle], "rows/s", note=side[middle].note)
        if name.startswith("cuda"):
            host_us = 1e6 * side[middle].host_s / side[middle].minibatches
            bench.figures.add(f"{name}, processor time of next()", host_us, "us/minibatch")
    alone = [run.rows / run.seconds["training"] for run in runs["cuda"]]
    bench.figures.add("training alone", median_low(alone), "rows/s")
    stats = runs["cuda"][-1].stats
    for stage, seconds in stats.get("seconds", {}).items():
        bench.figures.add(f"cuda, whole run: {stage}", seconds, "s")
    name = f"cuda, hit ratio with {bench.sizes.cache_share:.0%} of the features in lines"
    bench.figures.add(name, stats["hit_ratio"], "")
    bench.figures.add("cuda, read from disk", stats["bytes_read"] / 1e6, "MB")
    bench.figures.add("cuda, memory as stats() lists it", sum(stats["memory"].values()) / 1e6, "MB")


@contextmanager
def joined(group: Path, limit_bytes: int) -> Iterator[None]:
    """This process is in a memory control group (version 1), and may take so many bytes more there.

    Raises OSError for a group of version 2.
    """
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


class Comparison:
    """The sides of the comparison; each call is one run."""

    def __init__(self, bench: Bench) -> None:
        self._sizes, self._to = bench.sizes, bench.device.torch_device
        spec = GraphSpec(
            node_count=self._sizes.feature_bytes // (4 * self._sizes.dim),
            degree=self._sizes.degree,
            dim=self._sizes.dim,
            classes=_CLASSES,
            train_count=self._sizes.batch_size * self._sizes.minibatches,
        )
        self._store = make_dataset(bench.directory, spec)
        self._table = self._store.table(TABLE)
        self._labels = self._store.labels[NODE].long()
        self._train = self._store.split("train")
        self._cache_bytes = int(spec.feature_bytes * self._sizes.cache_share)
        print(f"{spec.node_count:,} rows of {spec.row_bytes} B", flush=True)

    def on_device(self, *, wait: bool = True) -> Run:
        with closing(self._loader("cuda")) as loader:
            return self._run(((m, m.features[TABLE]) for m in loader), loader.stats, wait=wait)

    def on_host(self) -> Run:
        with closing(self._loader("cpu")) as loader:
            return self._run((self._moved(m, m.features[TABLE]) for m in loader), loader.stats)

    def mapped(self, *, random: bool = False) -> Run:
        """random: the kernel reads the pages that are touched, and none ahead."""
        gids.io.drop_page_cache(self._store.path)
        features = map_array(self._table, random_access=random)
        sampler, topology = Neighbor(self._sizes.fanouts), Topology(self._store.graph(RELATION))

        def minibatches() -> Batches:
            for step, seeds in enumerate(self._train.split(self._sizes.batch_size)):
                minibatch = sampler.sample(topology, seeds, step=step, seed=0)
                minibatch.labels = self._labels[seeds]
                yield self._moved(minibatch, features[minibatch.input_nodes])

        with ExitStack() as limited:
            try:
                group = limited.enter_context(MemoryGroup())
                limited.enter_context(joined(group.path, self._cache_bytes + (1 << 30)))
            except OSError as error:
                print(f"the page cache is not limited: {error}", flush=True)
            return self._run(minibatches(), dict)

    def identical(self) -> int:
        """Compare some minibatches of the loaders. Returns their number."""
        compared = 0
        with closing(self._loader("cpu")) as host, closing(self._loader("cuda")) as other:
            for a, b in islice(zip(host, other, strict=True), _COMPARED):
                assert_same_minibatch(a, b)
                assert_same_rows(b.features[TABLE], a.features[TABLE].view(torch.int32))
                chosen = a.input_nodes[:64]
                assert torch.equal(a.features[TABLE][:64], self._table.read_rows(chosen)), "other rows"
                compared += 1
        return compared

    def _loader(self, device: str) -> NodeLoader:
        sizes = self._sizes
        rows_bytes = sizes.batch_size * 4 * sizes.dim * int(np.prod(np.add(sizes.fanouts, 1)))
        memory = self._cache_bytes + 8 * rows_bytes + (1 << 30)
        return open_loader(
            self._store,
            self._train,
            sizes,
            device=device,
            window=sizes.window,
            memory=memory if device == "cpu" else None,
            device_memory=memory,
            tuning=gids.Tuning(cache=self._cache_bytes, staging=sizes.staging_bytes),
        )

    def _moved(self, minibatch: Minibatch, rows: torch.Tensor) -> tuple[Minibatch, torch.Tensor]:
        for block in minibatch.blocks:
            block.indptr, block.indices = block.indptr.to(self._to), block.indices.to(self._to)
        minibatch.labels = minibatch.labels.to(self._to)
        return minibatch, rows.to(self._to)

    def _run(self, batches: Batches, stats: Callable[[], dict[str, Any]], *, wait: bool = True) -> Run:
        """Train until the end, or until the time is up. wait: for each minibatch's loss."""
        dims = [self._sizes.dim, *[self._sizes.hidden] * (len(self._sizes.fanouts) - 1), _CLASSES]
        training = Training(dims, seed=1, rate=1e-3, device=self._to)
        rows = done = 0
        waiting = trained = host_s = 0.0
        losses: list[torch.Tensor] = []
        begun = started = last = time.perf_counter()
        host, warm = time.thread_time(), False
        for number, (minibatch, x) in enumerate(batches):
            arrived, host_arrived = time.perf_counter(), time.thread_time()
            losses.append(training.step(minibatch.blocks, x, minibatch.labels).detach())
            if wait or not warm:
                losses[-1].item()  # waits for the device: what is timed is done
            now = time.perf_counter()
            if not warm:
                started = now
                warm = number + 1 >= self._sizes.warm or now - begun > self._sizes.most_s
            else:
                waiting, trained = waiting + arrived - last, trained + now - arrived
                host_s += host_arrived - host
                rows, done = rows + len(x), done + 1
            last, host = now, time.thread_time()
            if done and now - started > self._sizes.most_s:
                break
        assert done, "too few minibatches to measure"
        finite = torch.stack(losses).isfinite().all().item()  # waits for the device
        total_s = time.perf_counter() - started
        assert finite, "the loss is not finite"
        seconds = {"waiting for data": waiting, "training" if wait else "enqueueing": trained}
        return Run(rows, done, total_s, seconds, host_s, stats())
