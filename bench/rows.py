"""How much faster does gids read rows than torch on a memory-mapped tensor, and than GraphBolt's features?

    python bench/rows.py mapped                                   # 4.3 GB on disk, three minutes
    tools/graphbolt_env.sh DIRECTORY --bench            # rows.py graphbolt: 4.3 GB of disk, half an hour
    python bench/rows.py mapped --small                           # seconds; only shows that it works

mapped: random distinct rows of 4 KiB, in minibatches, without a cache. Baseline: ``features[ids]`` on a
memory-mapped tensor with 1, 2 and 16 threads, and with MADV_RANDOM.

graphbolt, in an environment in which DGL 2.1.0's GraphBolt can be imported:

* reads (rows of 4096 and of 512 B): ``read(ids)`` of gids.graphbolt.Feature, without a cache, against that of
  GraphBolt's TorchBasedFeature on a memory map, as OnDiskDataset makes it with ``in_memory: false``. Random
  distinct rows, so that no cache helps. 2 threads; GraphBolt also with 16. Also ``gids_fetch`` of the same
  ids, which has the next reads in flight while it returns a minibatch.
* pipe (4096 B): ``gids_fetch``, window 16, against ``fetch_feature`` in the same pipe: GraphBolt samples
  neighbors. Some rows are read repeatedly. A side that is not done after ``--pipe-seconds`` is stopped, as
  GraphBolt's is with a slow disk, and rates are compared.
* hits (4096 and 512 B): ``read(ids)`` of gids.graphbolt.Feature for cached rows, compared with
  ``torch.index_select`` of the same number of rows in memory.

``--newest DIRECTORY`` (built by tools/graphbolt_env.sh --dgl SOURCE) adds parts that no released DGL has:
reads of GraphBolt's newest disk feature, OnDiskNpyArray with io_uring; hits of its CPUCachedFeature with each
policy of its cache, and overlapped as in its read_async, which queries the next minibatch while rows are
copied and uses twice the threads.

All sides have the same rows, GraphBolt's in a .npy file. Except for hits they run in fresh processes with a
cold page cache, Linux's default read-ahead of 128 KiB (set if permitted), and the same memory (limited if
permitted): what they use before they open the rows plus a quarter of the rows, page cache included. For hits
both caches can hold all rows and are warmed up first. Every row is compared with the source, outside the
measured time. Sides run in alternating order; ratios are medians of the rounds' ratios. The rate of the
engine alone is printed too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    Figures,
    NumberedRows,
    Script,
    alternate,
    read_ahead,
    run_limited,
    write_numbered,
)

import gids.io
from gids.bench.probe import random_reads

THREADS = 2  # of gids, and of the baselines that have targets
OURS = ("gids", "gids_fetch")
STOCK, NEWEST = f"GraphBolt, {THREADS} threads", f"its newest, {THREADS} threads"
POLICIES = ("sieve", "s3-fifo", "lru", "clock")  # of its newest cache; sieve is its default
NEWEST_CACHES = {f"its newest, {name}": 1.2 for name in (*POLICIES, "overlapped")}
BARS = {  # by what is compared, and by the side that gids is compared with
    "mapped, 4096 B": {f"mapped, {THREADS} threads": 10.0},
    "reads, 4096 B": {NEWEST: 1.3},
    "reads, 512 B": {NEWEST: 1.1},
    "hits, 4096 B": NEWEST_CACHES,
    "hits, 512 B": NEWEST_CACHES,
}
CACHED_BYTES = 512 << 20
DEGREE = 12
Sides = dict[str, Any]


def run(side: str, threads: int, config: dict[str, Any], **options: Any) -> dict[str, float]:
    """Run a side of rows_side.py."""
    for path in (config["shard"], config.get("npy")):
        if path:
            gids.io.drop_page_cache(path)
    whole = {"interop_threads": threads, **config, **options, "side": side, "threads": threads}
    with read_ahead(Path(config["shard"]), DEFAULT_READ_AHEAD_BYTES):
        return run_limited("rows_side", whole)


def write_npy(path: Path, source: NumberedRows) -> None:
    array = np.lib.format.open_memmap(path, "w+", np.float32, source.shape)
    step = max(1, (64 << 20) // array[0].nbytes)
    for start in range(0, len(array), step):
        source.read_into(start, torch.from_numpy(array[start : start + step]))
    array.flush()


def write_graph(path: Path, rows: int, seed: int) -> None:
    """A graph whose edges come from few nodes mostly: indptr and indices."""
    rng = np.random.default_rng(seed)
    indptr = np.arange(rows + 1, dtype=np.int64) * DEGREE
    sources = (rows * rng.random(rows * DEGREE) ** 3).astype(np.int64)
    np.savez(path, indptr=indptr, indices=rng.permutation(rows)[sources])


def compare(figures: Figures, name: str, sides: Sides, rounds: int) -> None:
    """Run the sides, the first of which is gids."""
    results = alternate(sides, rounds)
    rates = {side: [r["rows_per_s"] for r in runs] for side, runs in results.items()}
    cpu_us = {side: 1e6 * median(r["cpu_s_per_row"] for r in runs) for side, runs in results.items()}
    for side, values in rates.items():
        figures.add(f"{name}, {side}", median(values), "rows/s", note=f"{cpu_us[side]:.2f} us of CPU a row")
    for ours in (side for side in OURS if side in sides):
        for other in (side for side in sides if side not in OURS):
            bar = BARS.get(name, {}).get(other) if ours == "gids" else None
            figures.ratio(f"{name}, {ours} over {other}", rates[ours], rates[other], bar=bar)


def sides_of_mapped(config: dict[str, Any], threads: Sequence[int]) -> Sides:
    plain, advised = ({**config, "what": "reads", "advised": advised} for advised in (False, True))
    return {
        "gids": partial(run, "gids_loader", THREADS, plain),
        **{f"mapped, {n} threads": partial(run, "mapped", n, plain) for n in threads},
        **{f"mapped, advised, {n} threads": partial(run, "mapped", n, advised) for n in threads if n > 1},
    }


def sides_of_reads(config: dict[str, Any]) -> Sides:
    reads = {**config, "what": "reads"}
    sides: Sides = {side: partial(run, side, THREADS, reads) for side in OURS}
    sides |= {STOCK: partial(run, "graphbolt", THREADS, reads)}
    sides |= {"GraphBolt, 16 threads": partial(run, "graphbolt", 16, reads)}
    return sides | ({NEWEST: partial(run, "newest", THREADS, reads)} if config["newest"] else {})


def sides_of_pipe(config: dict[str, Any], seconds: float) -> Sides:
    pipe = {**config, "what": "pipe", "seconds": seconds}
    return {"gids": partial(run, "gids", THREADS, pipe), STOCK: partial(run, "graphbolt", THREADS, pipe)}


def sides_of_hits(config: dict[str, Any]) -> Sides:
    row_bytes = 4 * config["dim"]
    cached_rows = min(config["rows"], CACHED_BYTES // row_bytes)
    # Room for a tenth more: GraphBolt's cache is in parts, which are not filled alike.
    cache_bytes = cached_rows * row_bytes * 11 // 10
    hits = {**config, "what": "hits", "cached_rows": cached_rows, "cache_bytes": cache_bytes}
    sides: Sides = {"gids": partial(run, "gids", THREADS, hits)}
    if config["newest"]:
        newest = partial(run, "newest", THREADS, hits)
        for policy in POLICIES:
            sides[f"its newest, {policy}"] = partial(newest, policy=policy, overlapped=False)
        ahead = {"policy": POLICIES[0], "overlapped": True, "interop_threads": 2 * THREADS}
        sides["its newest, overlapped"] = partial(newest, **ahead)
    return {**sides, "torch.index_select": partial(run, "torch", THREADS, hits)}


def measure(args: argparse.Namespace, figures: Figures, row_bytes: int, whats: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-rows-") as folder:
        directory, rows, dim = Path(folder), args.rows or args.bytes // row_bytes, row_bytes // 4
        shard = write_numbered(directory / "rows.gids", rows, dim)
        config: dict[str, Any] = {"dataset": str(directory / "rows.gids"), "shard": str(shard)}
        config |= {"rows": rows, "dim": dim, "newest": str(args.newest or "")}
        config |= {name: getattr(args, name) for name in ("batch", "seconds", "batches", "seed")}
        if args.question == "graphbolt":
            config |= {"npy": str(directory / "rows.npy"), "graph": str(directory / "graph.npz")}
            write_npy(directory / "rows.npy", NumberedRows(rows, dim))
            if "pipe" in whats:
                write_graph(directory / "graph.npz", rows, args.seed)
        for what in whats:
            sides = {
                "mapped": lambda: sides_of_mapped(config, [THREADS] if args.small else [1, THREADS, 16]),
                "reads": lambda: sides_of_reads(config),
                "pipe": lambda: sides_of_pipe(config, args.pipe_seconds),
                "hits": lambda: sides_of_hits(config),
            }[what]()
            compare(figures, f"{what}, {row_bytes} B", sides, args.rounds)
            if what in ("mapped", "reads"):
                device = random_reads([shard], page_bytes=row_bytes, seconds=args.seconds)
                figures.add(f"{what}, {row_bytes} B, the engine alone", device.reads_per_s, "reads/s")


def mapped(args: argparse.Namespace, figures: Figures) -> None:
    measure(args, figures, 4096, ["mapped"])


def graphbolt(args: argparse.Namespace, figures: Figures) -> None:
    for row_bytes in (4096, 512):
        names = {str(row_bytes): "reads", "pipe": "pipe", "hits": "hits"}
        whats = [what for name, what in names.items() if args.only in (None, name)]
        whats = [what for what in whats if what != "pipe" or row_bytes == 4096]
        if whats:
            measure(args, figures, row_bytes, whats)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "rounds", "seed", questions={"mapped": mapped, "graphbolt": graphbolt})
    option = script.option
    text = "size of the features (default: 4 GiB; graphbolt: 2 GiB)"
    option("bytes", text=text, type=int, small=16 << 20)
    option("rows", text="number of rows, in place of --bytes", type=int)
    option("batch", 8192, "rows per read", small=512)
    option("seconds", 4.0, "time limit of each run of reads or hits", small=0.2)
    only = ["4096", "512", "pipe", "hits"]
    option("only", text="graphbolt: run only this; a number: reads", type=str, choices=only)
    option("batches", 40, "minibatches per run of the pipe", small=8)
    option("pipe-seconds", 15.0, "time limit of each run of the pipe")
    text = "where GraphBolt's newest features were built"
    option("newest", text=text, type=Path, metavar="DIRECTORY")
    script.defaults("mapped", bytes=4 << 30)
    script.defaults("graphbolt", bytes=2 << 30)
    script.run()
