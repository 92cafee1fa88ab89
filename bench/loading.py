"""How long does it take to get the rows of minibatches, from cold, by policy, from memory, by disks?

    python bench/loading.py cold      # each of the first minibatches, beside torch on a mapped file
    python bench/loading.py cold --sampler ladies --fanouts 40,40,40
    python bench/loading.py windows   # time and hits by window, policy and cache
    python bench/loading.py buffer    # a constant buffer of the hottest rows, beside none and lookahead
    python bench/loading.py memory    # from disk, from the cache, and from a tensor in memory
    python bench/loading.py disks     # one disk limited to 1, 2 and 4 times a rate, by a control group
    python bench/loading.py cold --small

Park et al., "GIDS", PVLDB 17(6), 2024: windows are figures 11 and 12, buffer is figure 10, and LADIES is
figure 15. The first version of the preprint (arXiv 2306.16384v1) has figures 9 (cold), 15 (disks) and 16
(memory). A synthetic graph; Neighbor, fanouts 5, 5, 10. Milliseconds are those of aggregation: planning,
waiting and copying, without sampling. The consumer does nothing else, and every row of the last minibatch is
compared with the dataset.

cold: each run is a fresh process, which drops the page cache and stops if more than 1 % of the features are
still there. torch: index_select on the mapped shard, of the same rows, with MADV_RANDOM and with the
read-ahead that Linux has by default (set if permitted). Its page cache is not limited; gids gets --memory.

windows, buffer: rows of 512 B, a page each, so that a cache of a few minibatches has about 1 % of the table,
as in the paper. windows: a run's first minibatches, twice as many as the cache holds, fill the cache and are
not measured. buffer: every row is read once before. random: pages drawn at random; reverse PageRank: the
pages with the most expected visits, as published.

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
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    Figures,
    Script,
    alternate,
    read_ahead,
    read_ahead_bytes,
    run_side,
)

import gids
from gids.bench.features import map_array
from gids.bench.plot import plot_curves
from gids.bench.sampling import SAMPLERS, make_sampler
from gids.convert.synthetic import GraphSpec
from gids.heat import reverse_pagerank, write_heat
from gids.io import drop_page_cache
from gids.store import FeatureStore
from gids.store.names import NODE

POLICIES = [
    *(("random", 0), ("pinned", 0)),
    *(("window-pin", 4), ("window-pin", 8), ("window-pin", 16)),
    *(("lookahead", 4), ("lookahead", 8), ("lookahead", 16)),
]
SIDES = {  # of cold: the kind of map, and the window
    "gids, window 16": ("", 16),
    "gids, window 0": ("", 0),
    "torch, MADV_RANDOM": ("random", 0),
    "torch, read-ahead": ("read-ahead", 0),
}
AGGREGATION = ("plan", "wait", "gather")
_BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Run:
    """What is measured after the warm-up.

    aggregation_ms, rows: of each minibatch. seconds: of all, sampling and warm-up included. hits: percent of
    the pages. cached: share of the features in the page cache at the start.
    """

    aggregation_ms: list[float]
    rows: list[int]
    seconds: float
    hits: float = 0.0
    reads_per_s: float = 0.0
    bytes_read: int = 0
    cached: float = 0.0

    def mean(self, first: int = 0) -> float:
        return float(np.mean(self.aggregation_ms[first:]))

    @property
    def total_ms(self) -> float:
        return float(np.sum(self.aggregation_ms))


class Loading:
    """A dataset, and the minibatches that every run reads."""

    def __init__(self, store: FeatureStore, args: argparse.Namespace) -> None:
        self.store, self._seeds, self._args = store, store.split("train"), args
        self.sampler = make_sampler(args.sampler, args.fanouts, args.batch_size, threads=1)
        self.paths = [shard for table in store.tables.values() for shard in table.shard_paths]

    def loader(self, source: Any, *, shuffle: bool = True, **options: Any) -> gids.NodeLoader:
        options |= {"batch_size": self._args.batch_size, "shuffle": shuffle, "labels": False, "seed": 0}
        return gids.NodeLoader(source, self._seeds, self.sampler, **options)

    def input_nodes(self, count: int, *, shuffle: bool = True) -> Iterator[torch.Tensor]:
        """Of the minibatches that every run reads, if they are shuffled."""
        with gids.open(self.store, window=0) as source:
            for minibatch in islice(self.loader(source, tables=[], shuffle=shuffle), count):
                yield minibatch.input_nodes

    def run(self, *, warm: int = 0, filled: bool = False, **options: Any) -> Run:
        """Read the minibatches, and as many as `warm` before them. filled: read every row before that.

        options: of gids.open().
        """
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
                counts = stats["hits"], stats["pages"], stats["pages_read"], stats["bytes_read"]
                return *counts, time.perf_counter(), spent_s

            marks, rows = [mark()], []
            for minibatch in islice(loader, warm + self._args.batches):
                marks.append(mark())
                rows.append(sum(len(values) for values in minibatch.features.values()))
            for name, values in minibatch.features.items():
                expected = self.store.table(name).read_rows(minibatch.input_nodes)
                assert torch.equal(values, expected), "rows differ"
        hits, pages, reads, bytes_read, seconds, _ = np.subtract(marks[-1], marks[warm])
        each = 1e3 * np.diff([mark[-1] for mark in marks])
        return Run(
            aggregation_ms=each[warm:].tolist(),
            rows=rows[warm:],
            seconds=marks[-1][-2] - marks[0][-2],
            hits=100 * float(hits / max(1, pages)),
            reads_per_s=float(reads / seconds),
            bytes_read=int(bytes_read),
        )

    def mapped(self, *, random_access: bool) -> Run:
        """torch on the mapped shard, on the same minibatches."""
        (table,) = self.store.tables.values()
        return self.select(map_array(table, random_access=random_access))

    def select(self, array: torch.Tensor) -> Run:
        (table,) = self.store.tables.values()
        spent, rows = [], []
        first = time.perf_counter()
        for nodes in self.input_nodes(self._args.batches):
            begun = time.perf_counter()
            chosen = array.index_select(0, nodes)
            spent.append(1e3 * (time.perf_counter() - begun))
            rows.append(len(nodes))
        seconds = time.perf_counter() - first
        assert torch.equal(chosen, table.read_rows(nodes)), "rows differ"
        return Run(spent, rows, seconds)


def cold(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    shared = {name: getattr(args, name) for name in ("sampler", "fanouts", "batch_size", "batches", "memory")}

    def side(mapped: str, window: int) -> Run:
        config = {"dataset": str(loading.store.path), "mapped": mapped, "window": window, "args": shared}
        return Run(**run_side("loading_side", config))

    folder = Path(loading.store.path)
    with read_ahead(folder, DEFAULT_READ_AHEAD_BYTES):
        around = read_ahead_bytes(folder)
        runs = alternate({name: partial(side, *how) for name, how in SIDES.items()}, args.rounds)
    print(f"read-ahead: {'unknown' if around is None else around} B")
    everyone = [run for of_side in runs.values() for run in of_side]
    assert all(run.rows == everyone[0].rows for run in everyone), "all read the same minibatches"
    figures.add("features in the page cache at a start", 100 * max(run.cached for run in everyone), "%")
    steps = list(range(1, args.batches + 1))
    columns = {
        name: np.median([run.aggregation_ms for run in of_side], 0).tolist() for name, of_side in runs.items()
    }
    figures.table(
        "milliseconds of aggregation",
        [{"minibatch": step} | {n: c[step - 1] for n, c in columns.items()} for step in steps],
    )
    for name, of_side in runs.items():
        figures.add(f"{name}: first minibatch", median(run.aggregation_ms[0] for run in of_side), "ms")
        figures.add(f"{name}: all minibatches", median(run.total_ms for run in of_side), "ms")
    ours, *others = runs
    for name in others:
        for what, value in (
            ("first minibatch", lambda run: run.aggregation_ms[0]),
            ("all minibatches", lambda run: run.total_ms),
            ("all minibatches with sampling", lambda run: run.seconds),
        ):
            figures.ratio(f"{name}, over {ours}: {what}", *(list(map(value, runs[n])) for n in (name, ours)))
    if args.plot:
        panels = {f"{args.memory} of memory": [(name, steps, values) for name, values in columns.items()]}
        titles = ("minibatch", "aggregation (ms)")
        plot_curves(args.plot, "The first minibatches, from cold", panels, titles, log_y=True)


def pages_of_a_minibatch(loading: Loading) -> float:
    """A row fills a page."""
    return float(np.mean([len(nodes) for nodes in loading.input_nodes(4, shuffle=False)]))


def windows(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    pages = pages_of_a_minibatch(loading)
    (table,), rows = loading.store.tables.values(), []
    for size in args.caches:
        sides = {}
        for policy, window in POLICIES:
            tuning = gids.Tuning(policy=policy, planned=2, cache=int(size * pages * table.page_bytes))
            options: dict[str, Any] = {"memory": "4GB", "tuning": tuning, "window": window}
            sides[f"{policy} {window}"] = partial(loading.run, warm=2 * size, **options)
        runs = alternate(sides, args.rounds)
        ms = {side: median(run.mean() for run in of_side) for side, of_side in runs.items()}
        hits = {side: of_side[0].hits for side, of_side in runs.items()}
        share = 100 * size * pages / table.page_count
        for policy, window in POLICIES:
            side = f"{policy} {window}"
            row = {"cache": f"{size} minibatches", "% of the table": share, "policy": policy}
            rows.append(row | {"window": window, "hits %": hits[side], "ms": ms[side]})
        figures.add(f"{size} minibatches: share of the table", share, "%")
        for better, worse, title in (
            ("window-pin 4", "random 0", "window-pin, W = 4, over random"),
            ("window-pin 8", "random 0", "window-pin, W = 8, over random"),
            ("window-pin 16", "random 0", "window-pin, W = 16, over random"),
            ("window-pin 8", "pinned 0", "window-pin, W = 8, over 40 % pinned"),
            ("lookahead 8", "window-pin 8", "lookahead, W = 8, over window-pin, W = 8"),
            ("lookahead 16", "window-pin 16", "lookahead, W = 16, over window-pin, W = 16"),
        ):
            figures.add(f"{size} minibatches, {title}: hits", hits[better] / hits[worse], "x")
            figures.add(f"{size} minibatches, {title}: speed", ms[worse] / ms[better], "x")
    figures.table("time and hits of aggregation, by window and policy", rows)


def buffer(loading: Loading, args: argparse.Namespace, figures: Figures) -> None:
    (table,), store = loading.store.tables.values(), loading.store
    drawn = np.random.default_rng(0).random(store.num_nodes(NODE))
    write_heat(store.path, "sampled", {NODE: drawn})  # stands for no heat: pages at random
    write_heat(store.path, "reverse-pagerank", reverse_pagerank(store, {NODE: store.split("train").numpy()}))
    loading = Loading(FeatureStore(store.path), args)
    pages = pages_of_a_minibatch(loading)
    # what stands for the cache of the GPU: two minibatches
    small = {"tuning": gids.Tuning(policy="random", planned=2, cache=int(2 * pages * table.page_bytes))}
    options: dict[str, Any] = {"memory": "8GB", "window": 8}
    sides = {"none": partial(loading.run, warm=4, **options, **small)}
    for share in args.shares:
        for name, policy, heat in (
            ("random pages", "static", "sampled"),
            ("reverse PageRank", "static", "reverse-pagerank"),
            ("lookahead", "lookahead", "reverse-pagerank"),
        ):
            lines = table.page_count * share // 100 + int(2 * pages)
            tuning = gids.Tuning(policy=policy, planned=2, cache=lines * table.page_bytes)
            sides[f"{share} %, {name}"] = partial(
                loading.run, filled=True, tuning=tuning, heat=heat, **options
            )
    runs = alternate(sides, args.rounds)
    ms = {side: median(run.mean() for run in of_side) for side, of_side in runs.items()}
    rows, read = [], {}
    for side, (run, *_) in runs.items():
        rows_bytes = table.row_bytes * float(np.mean(run.rows))
        read[side] = run.bytes_read / len(run.rows)
        row = {"buffer": side, "hits %": run.hits, "MB read": read[side] / 1e6, "ms": ms[side]}
        rows.append(row | {"MB/s": rows_bytes / ms[side] / 1e3})
    figures.table("a minibatch by the buffer in host memory", rows)
    for side in list(sides)[1:]:
        figures.add(f"none over {side}: bytes read", read["none"] / max(1, read[side]), "x")
        figures.add(f"{side} over none: rows/s", ms["none"] / ms[side], "x")


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
    figures.add("from disk over torch.index_select in memory: time", disk.mean() / tensor.mean(), "x")
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
        store = make_dataset(Path(folder), spec, page_bytes=4 * args.dim)
        question(Loading(store, args), args, figures)


if __name__ == "__main__":
    asked = (cold, windows, buffer, memory, disks)
    questions = {question.__name__: partial(ask, question) for question in asked}
    script = Script(__doc__, "dir", "plot", questions=questions)
    option = script.option
    option("nodes", text="(default: 400000; windows, buffer: 4000000)", type=int)
    option("dim", text="float32 per row, which fills a page (default: 1024; windows, buffer: 128)", type=int)
    option("sampler", "neighbor", choices=SAMPLERS)
    option("fanouts", [5, 5, 10], "of ladies: nodes of a layer by seed", small=[2, 2])
    option("batch-size", text="(default: 64; windows, buffer: 32)", type=int)
    option("batches", 20, "minibatches of a run", small=4)
    option("memory", "400MB", "of the loader", small="20MB")
    option("caches", [2, 5, 10], "windows: in minibatches", small=[2])
    option("shares", [10, 20], "buffer: percent of the features", small=[20])
    option("rounds", 3, "cold, windows, buffer: alternating runs of each side", small=1)
    option("reads-per-s", 10_000, "disks: of one disk")
    small = {"nodes": 1000, "dim": 128, "batch_size": 8}
    for name in questions:
        sizes = {"nodes": 400_000, "dim": 1024, "batch_size": 64}
        if name in ("windows", "buffer"):
            sizes = {"nodes": 4_000_000, "dim": 128, "batch_size": 32}
        script.defaults(name, small, **sizes)
    script.run()
