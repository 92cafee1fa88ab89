"""How fast does GraphSAGE train on a GPU from features on disk, and where does the time go? Called by gpu.py.

A synthetic graph with features of several times the cache; plain PyTorch. Sides: gids.NodeLoader with its
cache in device memory, which a kernel or a copy engine fills (transfer=); the same loader with its cache in
host memory, moving features to the device; and torch indexing of the memory-mapped features, moved to the
device, with the same sampler. All have the same minibatches, model and initial weights. The page cache is
dropped before each run, but not limited. Each side is stopped after a while and compared by rows per second,
without its first minibatches. Before that, minibatches of the loaders are compared bit for bit with each
other and with the source.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, cast

import numpy as np
import torch
from figures import Figures
from gpu_sampling import same_minibatch
from harness import alternate, median_ratio
from sage import GraphSage

import gids.io
from gids import NodeLoader
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.cuda import Device
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.store import FeatureStore
from gids.store.names import NODE, RELATION

_TABLE = f"{NODE}.feat"
_CLASSES = 16
_COMPARED = 4
"""Minibatches of each device loader that are compared with the CPU's."""

Transfer = Literal["kernel", "copy"]


@dataclass(frozen=True)
class TrainingSizes:
    """cache_share: of the features. most_s: after which a side is stopped. warm: minibatches not counted."""

    feature_bytes: int = 4 << 30
    dim: int = 1024
    degree: float = 16.0
    batch_size: int = 256
    fanouts: tuple[int, ...] = (10, 5, 5)
    minibatches: int = 60
    warm: int = 4
    most_s: float = 6.0
    hidden: int = 128
    cache_share: float = 0.25
    rounds: int = 2
    window: int = 16
    staging_bytes: int = 256 << 20


SMALL = TrainingSizes(
    feature_bytes=2 << 20,
    dim=256,
    degree=6.0,
    batch_size=8,
    fanouts=(3, 2),
    minibatches=6,
    warm=1,
    hidden=8,
    rounds=1,
    window=3,
    staging_bytes=1 << 20,
)


@dataclass
class Run:
    """A run of one side, without its warm-up. seconds: by stage."""

    rows: int
    minibatches: int
    total_s: float
    seconds: dict[str, float]
    stats: dict[str, Any]


Batches = Iterator[tuple[Minibatch, torch.Tensor]]


def training(device: Device, directory: Path, sizes: TrainingSizes, figures: Figures) -> None:
    spec = GraphSpec(
        node_count=sizes.feature_bytes // (4 * sizes.dim),
        degree=sizes.degree,
        dim=sizes.dim,
        classes=_CLASSES,
        train_count=sizes.batch_size * sizes.minibatches,
    )
    source, path = directory / "graph", directory / "graph.gids"
    begun = time.perf_counter()
    write_graph(source, spec)
    if gids_command(["convert", str(source), str(path), "--quiet"]) != 0:
        raise SystemExit("the conversion failed")
    print(
        f"{spec.node_count:,} rows of {spec.row_bytes} B, made in {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    compare = Comparison(device, source, path, spec, sizes)
    figures.add("minibatches of cpu and cuda are the same, bit for bit", compare.identical(), "minibatches")
    runs = alternate(
        {
            "cuda": lambda: compare.on_device("kernel"),
            "cuda, transfer copy": lambda: compare.on_device("copy"),
            "cpu, moved": compare.on_host,
            "mapped, moved": compare.mapped,
        },
        sizes.rounds,
    )
    shutil.rmtree(source)
    _report(figures, runs, sizes)


class Comparison:
    """The sides of the comparison; each call is one run."""

    def __init__(
        self, device: Device, source: Path, path: Path, spec: GraphSpec, sizes: TrainingSizes
    ) -> None:
        self._device, self._source, self._path, self._sizes = device, source, path, sizes
        self._labels = torch.from_numpy(np.load(source / "labels.npy"))
        self._train = torch.from_numpy(np.load(source / "train_idx.npy"))
        self._dims = [spec.dim, *[sizes.hidden] * (len(sizes.fanouts) - 1), _CLASSES]
        self._cache_bytes = int(spec.feature_bytes * sizes.cache_share)

    def on_device(self, transfer: Transfer) -> Run:
        loader = self._loader("cuda", transfer)
        with closing(loader):
            return self._run(((m, m.features[_TABLE]) for m in loader), loader.stats)

    def on_host(self) -> Run:
        loader = self._loader("cpu")
        with closing(loader):
            return self._run((self._moved(m, m.features[_TABLE]) for m in loader), loader.stats)

    def mapped(self) -> Run:
        gids.io.drop_page_cache(self._source / "feat.npy")
        features = torch.from_numpy(np.load(self._source / "feat.npy", mmap_mode="c"))
        sampler = Neighbor(self._sizes.fanouts)
        topology = Topology(FeatureStore(self._path).graph(RELATION))
        size = self._sizes.batch_size

        def minibatches() -> Batches:
            for step in range(self._sizes.minibatches):
                seeds = self._train[step * size : (step + 1) * size]
                found = sampler.sample(topology, seeds, step=step)
                found.labels = self._labels[seeds]
                yield self._moved(found, features[found.input_nodes])

        return self._run(minibatches(), dict)

    def identical(self) -> int:
        """Compare some minibatches of the loaders. Returns their number."""
        features = torch.from_numpy(np.load(self._source / "feat.npy", mmap_mode="c"))
        compared = 0
        for transfer in ("kernel", "copy"):
            with closing(self._loader("cpu")) as host, closing(self._loader("cuda", transfer)) as other:
                for a, b in islice(zip(host, other, strict=True), _COMPARED):
                    assert same_minibatch(a, b), "the blocks differ"
                    rows, moved = a.features[_TABLE], b.features[_TABLE].cpu()
                    assert torch.equal(rows.view(torch.int32), moved.view(torch.int32)), "the features differ"
                    chosen = cast(torch.Tensor, a.input_nodes)[:64]
                    assert torch.equal(rows[:64], features[chosen]), "other rows than the source's"
                    compared += 1
        return compared

    def _loader(self, device: str, transfer: Transfer = "kernel") -> NodeLoader:
        gids.io.drop_page_cache(self._path)
        rows_bytes = (
            self._sizes.batch_size * 4 * self._sizes.dim * int(np.prod(np.add(self._sizes.fanouts, 1)))
        )
        memory = self._cache_bytes + 8 * rows_bytes + (1 << 30)
        return NodeLoader(
            gids.open(
                self._path,
                window=self._sizes.window,
                memory=memory if device == "cpu" else None,
                device_memory=memory,
                tuning=gids.Tuning(
                    cache=self._cache_bytes, staging=self._sizes.staging_bytes, transfer=transfer
                ),
            ),
            self._train,
            self._sizes.fanouts,
            tables=[_TABLE],
            batch_size=self._sizes.batch_size,
            shuffle=False,
            device=device,
        )

    def _moved(self, minibatch: Minibatch, rows: torch.Tensor) -> tuple[Minibatch, torch.Tensor]:
        to = self._device.torch_device
        for block in cast(list[Block], minibatch.blocks):
            block.indptr, block.indices = block.indptr.to(to), block.indices.to(to)
        minibatch.labels = cast(torch.Tensor, minibatch.labels).to(to)
        return minibatch, rows.to(to)

    def _run(self, batches: Batches, stats: Callable[[], dict[str, Any]]) -> Run:
        """Train until the end, or until the time is up."""
        torch.manual_seed(1)
        model = GraphSage(self._dims).to(self._device.torch_device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        rows = done = 0
        waiting = training = 0.0
        losses = []
        started = last = time.perf_counter()
        for number, (minibatch, x) in enumerate(batches):
            arrived = time.perf_counter()
            labels = cast(torch.Tensor, minibatch.labels)
            loss = torch.nn.functional.cross_entropy(model(cast(list[Block], minibatch.blocks), x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the device: what is timed is done
            now = time.perf_counter()
            if number < self._sizes.warm:
                started = now
            else:
                waiting, training = waiting + arrived - last, training + now - arrived
                rows, done = rows + len(x), done + 1
            last = now
            if done and now - started > self._sizes.most_s:
                break
        assert done, "too few minibatches to measure"
        assert np.isfinite(losses).all(), "the loss is not finite"
        return Run(rows, done, last - started, {"waiting for data": waiting, "training": training}, stats())


def _report(figures: Figures, runs: dict[str, list[Run]], sizes: TrainingSizes) -> None:
    rates = {name: [run.rows / run.total_s for run in side] for name, side in runs.items()}
    for name in ("cpu, moved", "mapped, moved"):
        figures.add(f"training rows/s, cuda over {name}", median_ratio(rates["cuda"], rates[name]), "x")
    copied = rates["cuda, transfer copy"]
    figures.add("training rows/s, transfer copy over kernel", median_ratio(copied, rates["cuda"]), "x")
    for name, side in runs.items():
        middle = rates[name].index(median_low(rates[name]))
        run = side[middle]
        milliseconds = {what: 1e3 * s / run.minibatches for what, s in run.seconds.items()}
        note = ", ".join(f"{what} {ms:.1f} ms" for what, ms in milliseconds.items())
        note += f" a minibatch of {run.rows // run.minibatches:,} rows; {run.minibatches} minibatches"
        figures.add(f"training, {name}", rates[name][middle], "rows/s", note=note)
    stats = runs["cuda"][-1].stats
    for stage, seconds in stats.get("seconds", {}).items():
        figures.add(f"cuda, whole run: {stage}", seconds, "s")
    figures.add(
        f"cuda, hit ratio with {sizes.cache_share:.0%} of the features in lines", stats["hit_ratio"], ""
    )
    figures.add("cuda, read from disk", stats["bytes_read"] / 1e6, "MB")
    figures.add("cuda, memory as stats() lists it", sum(stats["memory"].values()) / 1e6, "MB")
