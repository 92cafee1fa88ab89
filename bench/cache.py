"""How many pages does lookahead hit, and what do planning and gathering cost?

    python bench/cache.py hits       hit ratio by policy and window, compared with Belady's MIN
    python bench/cache.py planning   enter + plan + retire, per page of the minibatch, by number of lines
                                     (--most-lines 100000000 for more than 10 million)
    python bench/cache.py gather     plan + gather of cached rows, compared with torch.index_select; and
                                     rows stored with fewer bits, as float32, compared with float32

Baselines: MIN over the same trace; torch.index_select(out=) on the same rows in memory. Seeds are fixed. A
trace is a list of int64 arrays: the unique nodes of each minibatch of neighbor sampling on an R-MAT graph, or
pages with a skewed popularity.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from graphs import graph_of, input_nodes, rmat
from harness import Figures, Script, alternate

import gids
from gids import _core
from gids.bench.trace import Optimum, replay
from gids.cache import page_heat
from gids.sampler import Neighbor, Topology
from gids.store.names import NODE
from gids.write import DatasetWriter

TABLE = f"{NODE}.feat"
FANOUTS = (5, 5, 10)  # the last one applies to the seeds
SEEDS = 12  # of a minibatch, so that 1 % of the pages are about five minibatches
STORAGE_TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8 per row": {"dtype": torch.int8, "scale": "row"},
    "int8 per column": {"dtype": torch.int8, "scale": "column"},
}


def popular_pages(pages: int, rank: np.ndarray) -> np.ndarray:
    """The page of each rank of popularity, scattered over the table."""
    return rank * 2654435761 % pages


def skewed_trace(pages: int, batch: int, minibatches: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Minibatches of `batch` unique pages whose popularity follows a power law."""
    trace = []
    for _ in range(minibatches):
        drawn = (pages * rng.random(int(batch * 1.6)) ** 3).astype(np.int64)
        unique = np.unique(popular_pages(pages, drawn))
        trace.append(rng.permutation(unique)[:batch])
    return trace


def hits(args: argparse.Namespace, figures: Figures) -> None:
    log2_nodes, seeds, minibatches = (15, 4, 200) if args.small else (20, SEEDS, 1200)
    rng = np.random.default_rng(1)
    graph = graph_of(*rmat(log2_nodes, 16, rng))
    order = rng.permutation(np.flatnonzero(np.diff(graph.indptr)))  # of the seeds, again and again
    seed, topology, sampler = int(rng.integers(1 << 31)), Topology(graph), Neighbor(FANOUTS)
    trace = []
    for step in range(minibatches):
        drawn = np.unique(np.take(order, range(step * seeds, (step + 1) * seeds), mode="wrap"))
        trace.append(rng.permutation(input_nodes(sampler, topology, drawn, seed=seed, step=step)))
    heat = page_heat(np.bincount(graph.indices, minlength=graph.num_dst), 1)
    pages, warm = np.array([len(batch) for batch in trace]), minibatches // 4
    lines = int(5 * pages.mean()) if args.small else graph.num_dst // 100
    hit = Optimum(trace, graph.num_dst).hits(lines)
    best = float(hit[warm:].sum() / pages[warm:].sum())
    size = f"{lines} lines = {lines / pages.mean():.3g} minibatches"
    print(f"{graph.num_dst} pages, {minibatches} minibatches of {pages.mean():.0f} pages")
    figures.add(f"{size}, MIN", 100 * best, "% hits")

    def ratio(policy: str, window: int) -> float:
        options = {"policy": policy, "window": window, "planned": 2, "heat": heat, "seed": 1, "warm": warm}
        replayed = replay(trace, graph.num_dst, lines=lines, **options)
        value = float(replayed.hits.sum() / pages[warm:].sum())
        assert value <= best, "no policy can beat MIN"
        note = f"{value / best:.3f} of MIN"
        figures.add(f"{size}, {policy} W={window}", 100 * value, "% hits", note=note)
        return value

    for policy in ("random", "lru", "static"):
        ratio(policy, 0)
    pin = ratio("window-pin", 8)
    for window in (16, 22):
        ratio("window-pin", window)
    by_window = [ratio("lookahead", w) for w in range(23)]
    figures.add("lookahead W=16 of MIN", by_window[16] / best, "x", bar=0.87)
    figures.add("lookahead W=20 of MIN", by_window[20] / best, "x", bar=0.90)
    figures.add("lookahead W=16 over window-pin W=8", by_window[16] / pin, "x", bar=1.4)
    fall = 100 * max(np.maximum.accumulate(by_window) - by_window)
    figures.add("largest fall as W grows", fall, "points", most=0.5)


def planning(args: argparse.Namespace, figures: Figures) -> None:
    for lines in (10**n for n in range(4, 10) if 10**n <= args.most_lines):
        rng = np.random.default_rng(2)
        batch, minibatches, pages = min(lines // 5, 100_000), 60 if args.small else 160, 4 * lines
        trace = skewed_trace(pages, batch, minibatches, rng)
        heat = rng.integers(0, 256, pages, np.uint8)
        costs = []
        for _ in range(args.repeat):
            planner = _core.Planner(pages, lines, "lookahead", 0, heat)  # alone: it takes 52 B per line
            # Fill the cache first: planning is dearest when every admission evicts.
            filling = [np.arange(first, min(first + batch, lines)) for first in range(0, lines, batch)]
            for step, ranks in enumerate(filling):
                planner.enter(step, popular_pages(pages, ranks))
                planner.plan(step)
                planner.retire(step)
            times, window, planned = [], 16, 2
            base = entered = len(filling)
            end = base + minibatches
            for step in range(base, end):
                start = time.perf_counter_ns()
                if step - base >= planned:
                    planner.retire(step - planned)
                while entered < min(end, step + 1 + window):
                    planner.enter(entered, trace[entered - base])
                    entered += 1
                planner.plan(step)
                if step - base > window and entered < end:
                    times.append((time.perf_counter_ns() - start) / len(trace[step - base]))
            costs.append(median(times))
            stats = planner.stats()
            del planner
        note = f"{batch} pages a minibatch, hit ratio {stats['hits'] / stats['pages']:.2f}"
        most_ns = 100 if lines <= 10**7 else None
        figures.add(f"{lines} lines, planning", median(costs), "ns per page", most=most_ns, note=note)


def gather(args: argparse.Namespace, figures: Figures) -> None:
    for row_bytes in (512, 4096):
        gather_rows(args, figures, row_bytes)


def gather_rows(args: argparse.Namespace, figures: Figures, row_bytes: int) -> None:
    """Gather the same rows from loaders of every storage type, as float32, and with torch.index_select."""
    threads, dim = torch.get_num_threads(), row_bytes // 4
    count = (4 << 20 if args.small else 1 << 30) // row_bytes
    source = torch.randn(count, dim, generator=torch.Generator().manual_seed(0))
    batches = [torch.randperm(count)[: count // 8] for _ in range(4)]
    rows_read, out = 4 * (count // 8), torch.empty(count // 8, dim)

    def select() -> float:
        begun = time.perf_counter()
        for ids in batches:
            torch.index_select(source, 0, ids, out=out)
        return rows_read / (time.perf_counter() - begun)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir)))
        loaders = {}
        for kind, storage in STORAGE_TYPES.items():
            path = folder / f"{len(loaders)}.gids"
            with DatasetWriter(path) as writer:
                writer.write_table("node", NODE, "feat", source, **storage)
            opened = gids.open(path, memory=4 << 30, window=2, threads=threads)
            loaders[kind] = stack.enter_context(gids.FeatureLoader(opened, [TABLE], dtype=torch.float32))
            fill(loaders[kind], torch.arange(count).split(count // 8))
        planned: list[float] = []  # rows per second of plan + gather of float32

        def gather_all(kind: str) -> float:
            """Rows per second of the gathering alone."""
            begun, before = time.perf_counter(), loaders[kind].stats()
            for ids, features in loaders[kind].attach(batches, table_ids):
                last = ids, features[TABLE]
            del features
            seconds, after = time.perf_counter() - begun, loaders[kind].stats()
            if kind == "float32":
                planned.append(rows_read / seconds)
                assert torch.equal(last[1], source[last[0]])
            assert after["misses"] == before["misses"], "all were hits"
            return rows_read / (after["seconds"]["gather"] - before["seconds"]["gather"])

        sides = {kind: partial(gather_all, kind) for kind in loaders}
        rates = alternate({**sides, "torch.index_select": select}, args.repeat)
    name, stock = f"{dim} values", rates.pop("torch.index_select")
    for what, ours, bar in (("plan + gather", planned, 0.6), ("gather", rates["float32"], 0.8)):
        note = f"{median(ours) / 1e6:.2f} and {median(stock) / 1e6:.2f} M rows/s"
        figures.ratio(f"{name}, {what} over index_select", ours, stock, bar=bar, note=note)
    for kind in list(STORAGE_TYPES)[1:]:
        figures.ratio(f"{name}, {kind}: gather over that of float32", rates[kind], rates["float32"])


def table_ids(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {TABLE: ids}


def fill(loader: gids.FeatureLoader, everything: Sequence[torch.Tensor]) -> None:
    """Read every page into the cache, and compare the rows."""
    table = loader.tables[0]
    for ids, features in loader.attach(everything, table_ids):
        assert torch.equal(features[TABLE], table.read_rows(ids).float()), "rows differ from the stored ones"


if __name__ == "__main__":
    questions = {"hits": hits, "planning": planning, "gather": gather}
    script = Script(__doc__, "dir", "repeat", questions=questions)
    text = "planning: lines of the largest cache (100000000, 0.4 TB of rows of 4 KiB, takes 6 GB of memory)"
    script.option("most-lines", 10**7, text, small=10**5)
    script.run()
