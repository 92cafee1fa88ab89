"""How long does it take to get the rows of minibatches, from cold, by policy, from memory, by disks?

    python bench/loading.py cold      # each of the first minibatches, beside torch on a mapped file
    python bench/loading.py windows   # time and hits by window, policy and cache
    python bench/loading.py memory    # from disk, from the cache, and from a tensor in memory
    python bench/loading.py disks     # one disk limited to 1, 2 and 4 times a rate, by a control group
    python bench/loading.py cold --small

Figures 9, 10, 11, 15 and 16 of Park et al., "GIDS", PVLDB 17(6), 2024. A synthetic graph with rows of
4 KiB; Neighbor, fanouts 5, 5, 10. Milliseconds are those of aggregation: planning, waiting and copying,
without sampling. The page cache is dropped before each run, the consumer does nothing else, and every row of
the last minibatch is compared with the dataset. torch: index_select on the mapped shard, with MADV_RANDOM, of
the same rows.

disks: stands in for several disks: one disk that may do so many reads per second. Needs root.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from graphs import make_dataset
from harness import Figures, Script, alternate
from plot import plot_curves

import gids
from gids.bench.features import map_array
from gids.convert.synthetic import GraphSpec
from gids.io import drop_page_cache
from gids.sampler import Neighbor
from gids.store import FeatureStore

POLICIES = [
    *(("random", 0), ("pinned", 0), ("static", 0)),
    *(("window-pin", 8), ("window-pin", 16)),
    *(("lookahead", 0), ("lookahead", 8), ("lookahead", 16)),
]
AGGREGATION = ("plan", "wait", "gather")
_BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Run:
    """aggregation_ms: of each minibatch. rows: of each. hits: percent of the pages after the warm-up."""

    aggregation_ms: list[float]
    rows: list[int]
    hits: float
    reads_per_s: float

    def mean(self, first: int = 0) -> float:
        return float(np.mean(self.aggregation_ms[first:]))


class Loading:
    """A dataset, and the minibatches that every run reads."""

    def __init__(self, store: FeatureStore, args: argparse.Namespace) -> None:
        self.store, self._seeds, self._args = store, store.split("train"), args
        self.sampler = Neighbor(args.fanouts, threads=1)
        self.paths = [shard for table in store.tables.values() for shard in table.shard_paths]

    def loader(self, source: Any, *, shuffle: bool = True, **options: Any) -> gids.NodeLoader:
        options |= {"batch_size": self._args.batch_size, "shuffle": shuffle, "labels": False, "seed": 0}
        return gids.NodeLoader(source, self._seeds, self.sampler, **options)

    def input_nodes(self, count: int, *, shuffle: bool = True) -> Iterator[torch.Tensor]:
        """Of the minibatches that every run reads, if they are shuffled."""
        with gids.open(self.store, memory="1GB") as source:
            for minibatch in islice(self.loader(source, tables=[], shuffle=shuffle), count):
                yield minibatch.input_nodes

    def run(self, *, warm: int = 0, filled: bool = False, **options: Any) -> Run:
        """Read the minibatches. filled: read every row before. options: of gids.open()."""
        for path in self.paths:
            drop_page_cache(path)
        with gids.open(self.store, reads="random", **options) as source, self.loader(source) as loader:
            if filled:
                (table,) = self.store.tables.values()
                features, chunks = loader.feature_loader, torch.arange(table.row_count).split(10_000)
                for _ in features.attach(chunks, lambda ids: {table.name: ids}):
                    pass

            def mark() -> tuple[float, ...]:
                stats = loader.stats()
                spent_s = sum(stats["seconds"][name] for name in AGGREGATION)
                return stats["hits"], stats["pages"], stats["pages_read"], time.perf_counter(), spent_s

            marks, rows = [mark()], []
            for minibatch in islice(loader, self._args.batches):
                marks.append(mark())
                rows.append(sum(len(values) for values in minibatch.features.values()))
            for name, values in minibatch.features.items():
                expected = self.store.table(name).read_rows(minibatch.input_nodes)
                assert torch.equal(values, expected), "rows differ"
        hits, pages, reads, seconds, _ = np.subtract(marks[-1], marks[warm])
        each = 1e3 * np.diff([mark[-1] for mark in marks])
        return Run(each.tolist(), rows, 100 * float(hits / max(1, pages)), float(reads / seconds))

    def mapped(self) -> Run:
        """torch on the mapped shard, on the same minibatches."""
        (table,) = self.store.tables.values()
        [shard] = table.shard_paths
        drop_page_cache(shard)
        return self.select(map_array(table, random_access=True))

    def select(self, array: torch.Tensor) -> Run:
        spent, rows = [], []
        for nodes in self.input_nodes(self._args.batches):
            begun = time.perf_counter()
            array.index_select(0, nodes)
            spent.append(1e3 * (time.perf_counter() - begun))
            rows.append(len(nodes))
        return Run(spent, rows, 0.0, 0.0)


def cold(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    sides = {
        "gids, window 16": loading.run(memory=args.memory, window=16),
        "gids, window 0": loading.run(memory=args.memory, window=0),
        "torch on a mapped file": loading.mapped(),
    }
    steps = list(range(1, args.batches + 1))
    columns = {name: run.aggregation_ms for name, run in sides.items()}
    figures.table(
        "milliseconds of aggregation",
        [{"minibatch": step} | {n: c[step - 1] for n, c in columns.items()} for step in steps],
    )
    ours, theirs = sides["gids, window 16"], sides["torch on a mapped file"]
    assert ours.rows == theirs.rows, "both read the same minibatches"
    figures.add("torch over gids, all minibatches", theirs.mean() / ours.mean(), "x")
    figures.add("gids: first minibatch", ours.aggregation_ms[0], "ms")
    figures.add("gids: mean of the second half", ours.mean(args.batches // 2), "ms")
    if args.plot:
        panels = {f"{args.memory} of memory": [(name, steps, values) for name, values in columns.items()]}
        titles = ("minibatch", "aggregation (ms)")
        plot_curves(args.plot, "The first minibatches, from cold", panels, titles, log_y=True)


def windows(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    # a row fills a page
    pages = float(np.mean([len(nodes) for nodes in loading.input_nodes(4, shuffle=False)]))
    (table,), rows = loading.store.tables.values(), []
    warm = args.batches // 4
    for size in args.caches:
        sides = {}
        for policy, window in POLICIES:
            tuning = gids.Tuning(policy=policy, planned=2, cache=int(size * pages * table.page_bytes))
            options: dict[str, Any] = {"memory": "4GB", "tuning": tuning, "window": window}
            sides[f"{policy} {window}"] = partial(loading.run, warm=warm, **options)
        runs = alternate(sides, args.rounds)
        ms = {side: median(run.mean(warm) for run in of_side) for side, of_side in runs.items()}
        for policy, window in POLICIES:
            side = f"{policy} {window}"
            row = {"cache": f"{size} minibatches", "policy": policy, "window": window}
            rows.append(row | {"hits %": runs[side][0].hits, "ms": ms[side]})
        for better, worse, title in (
            ("window-pin 8", "random 0", "window-pin, W = 8, over random"),
            ("window-pin 8", "pinned 0", "window-pin, W = 8, over 40 % pinned"),
            ("lookahead 16", "window-pin 8", "lookahead, W = 16, over window-pin, W = 8"),
        ):
            figures.add(f"{size} minibatches, {title}: speed", ms[worse] / ms[better], "x")
    figures.table("time and hits of aggregation, by window and policy", rows)


def memory(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    (table,) = loading.store.tables.values()
    whole = 2 * table.page_count * table.page_bytes
    disk = loading.run(memory=args.memory)
    cached = loading.run(filled=True, memory=whole + (1 << 30))
    tensor = loading.select(table.read_rows(torch.arange(table.row_count)))
    sides = {"gids, from disk": disk, "gids, from its cache": cached, "torch.index_select, in memory": tensor}
    figures.table(
        "features on disk and in memory",
        [{"side": name, "ms": run.mean(), "hits %": run.hits} for name, run in sides.items()],
    )
    figures.add("from disk over from the cache: time", disk.mean() / cached.mean(), "x")
    figures.add("from the cache over torch.index_select in memory: time", cached.mean() / tensor.mean(), "x")


@contextmanager
def limited(path: Path, reads_per_s: int) -> Iterator[None]:
    """Let this process do so many reads per second of the disk of path. Raises OSError if it may not."""
    device = os.stat(path).st_dev
    group = _BLKIO / f"gids-bench-{os.getpid()}"
    group.mkdir()
    try:
        device_name = f"{os.major(device)}:{os.minor(device)}"
        (group / "blkio.throttle.read_iops_device").write_text(f"{device_name} {reads_per_s}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def disks(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    rows: list[dict[str, Any]] = []
    try:
        for count in (1, 2, 4):
            with limited(loading.paths[0], count * args.reads_per_s):
                run = loading.run(memory=args.memory)
            row = {"disks": count, "reads/s allowed": count * args.reads_per_s}
            rows.append(row | {"reads/s": run.reads_per_s, "ms": run.mean()})
    except OSError as error:
        print(f"disks: not measured, a control group cannot limit this disk: {error}")
        return
    figures.table("one disk limited to as many reads as 1, 2 and 4 disks", rows)
    for row in rows[1:]:
        figures.add(f"{row['disks']} disks over one: speed", rows[0]["ms"] / row["ms"], "x")


def ask(question: Callable[..., None], args: argparse.Namespace, figures: Figures) -> None:
    spec = GraphSpec(args.nodes, degree=15, dim=args.dim, train_count=args.nodes // 4)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        store = make_dataset(Path(folder), spec, "--page-bytes", str(4 * args.dim), keep_source=False)
        question(Loading(store, args), args, figures)


if __name__ == "__main__":
    questions = {question.__name__: partial(ask, question) for question in (cold, windows, memory, disks)}
    script = Script(__doc__, "dir", "plot", questions=questions)
    option = script.option
    option("nodes", 400_000, small=1000)
    option("dim", 1024, "float32 per row, which fills a page", small=128)
    option("fanouts", [5, 5, 10], small=[2, 2])
    option("batch-size", 64, small=8)
    option("batches", 20, "minibatches of a run", small=4)
    option("memory", "400MB", "of the loader", small="20MB")
    option("caches", [2, 5, 10], "windows: in minibatches", small=[2])
    option("rounds", 3, "windows: alternating runs of each policy", small=1)
    option("reads-per-s", 10_000, "disks: of one disk")
    script.run()
