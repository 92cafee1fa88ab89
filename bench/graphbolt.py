"""How much faster does gids read cold rows than GraphBolt's features on disk, with and without lookahead?

    tools/graphbolt_env.sh DIRECTORY --bench            # 4.3 GB of disk for each row size, half an hour
    tools/graphbolt_env.sh DIRECTORY --bench --small    # a minute; only shows that it works

Needs an environment in which DGL 2.1.0's GraphBolt can be imported. Measures:

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

Both sides have the same rows, GraphBolt's in a .npy file. Except for hits they run in fresh processes with a
cold page cache, Linux's default read-ahead of 128 KiB (set if permitted), and the same memory (limited if
permitted): what they use before they open the rows plus a quarter of the rows, page cache included. For hits
both caches can hold all rows and are warmed up first. Every row is compared with the source, outside the
measured time. Sides run in alternating order; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    NumberedRows,
    alternate,
    make_parser,
    median_ratio,
    read_ahead,
    write_json,
    write_numbered,
)

import gids.io
from gids.bench.probe import random_reads
from gids.measure.isolation import run_fresh
from gids.measure.memory_group import MemoryGroup
from gids.measure.sides import why_no_limit

THREADS = 2
OURS = ("gids", "gids_fetch")
STOCK, NEWEST = f"GraphBolt, {THREADS} threads", f"its newest, {THREADS} threads"
POLICIES = ("sieve", "s3-fifo", "lru", "clock")  # of its newest cache; sieve is its default
CACHED_BYTES = 512 << 20
DEGREE = 12


def write(directory: Path, rows: int, dim: int) -> dict[str, Any]:
    """Write the same rows as a dataset and as a .npy file. Returns a part of the sides' configuration."""
    source = NumberedRows(rows, dim)
    shard = write_numbered(directory / "rows.gids", rows, dim)
    array = np.lib.format.open_memmap(directory / "rows.npy", "w+", np.float32, source.shape)
    step = max(1, (64 << 20) // (4 * dim))
    for start in range(0, rows, step):
        source.read_into(start, torch.from_numpy(array[start : start + step]))
    array.flush()
    return {
        "dataset": str(directory / "rows.gids"),
        "npy": str(directory / "rows.npy"),
        "shard": str(shard),
        "rows": rows,
        "dim": dim,
    }


def write_graph(path: Path, rows: int, seed: int) -> Path:
    """A graph whose edges come from few nodes mostly: indptr and indices."""
    rng = np.random.default_rng(seed)
    indptr = np.arange(rows + 1, dtype=np.int64) * DEGREE
    sources = (rows * rng.random(rows * DEGREE) ** 3).astype(np.int64)
    np.savez(path, indptr=indptr, indices=rng.permutation(rows)[sources])
    return path


def run(side: str, threads: int, config: dict[str, Any]) -> dict[str, float]:
    for name in ("shard", "npy"):
        gids.io.drop_page_cache(config[name])
    this = {"interop_threads": threads, **config, "side": side, "threads": threads}
    with read_ahead(Path(config["npy"]), DEFAULT_READ_AHEAD_BYTES), ExitStack() as stack:
        unlimited = config["what"] == "hits" or why_no_limit()
        group = None if unlimited else stack.enter_context(MemoryGroup("gids-graphbolt"))
        return run_fresh("graphbolt_side", {**this, "limited": group is not None}, group=group)


def compare(title: str, sides: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run the sides, of which one is "gids"; print and return the results."""
    results = alternate(sides, rounds)
    speeds = {name: [r["rows_per_s"] for r in found] for name, found in results.items()}
    ratios = {
        name: {ours: median_ratio(speeds[ours], speeds[name]) for ours in OURS if ours in sides}
        for name in sides
        if name not in OURS
    }
    for name, found in results.items():
        cpu_us = 1e6 * median(r["cpu_s_per_row"] for r in found)
        beside = ", ".join(f"{ours} is {r:.2f} x as fast" for ours, r in ratios.get(name, {}).items())
        speed = f"{median(speeds[name]):>9.0f} rows/s  {cpu_us:6.2f} us of CPU a row"
        print(f"{title:<10} {name:<22} {speed}  {beside}", flush=True)
    return {"rows_per_s": speeds, "ratios": ratios}


def sides_of_hits(config: dict[str, Any], newest: Path | None) -> dict[str, Any]:
    row_bytes = 4 * config["dim"]
    cached_rows = min(config["rows"], CACHED_BYTES // row_bytes)
    # Room for a tenth more: GraphBolt's cache is in parts, which are not filled alike.
    cache_bytes = cached_rows * row_bytes * 11 // 10
    of_hits = {**config, "what": "hits", "cached_rows": cached_rows, "cache_bytes": cache_bytes}
    sides = {"gids": partial(run, "gids", THREADS, of_hits)}
    if newest:
        of_theirs = {**of_hits, "newest": str(newest), "overlapped": False}
        for policy in POLICIES:
            sides[f"its newest, {policy}"] = partial(run, "newest", THREADS, {**of_theirs, "policy": policy})
        ahead = {**of_theirs, "policy": POLICIES[0], "overlapped": True, "interop_threads": 2 * THREADS}
        sides["its newest, overlapped"] = partial(run, "newest", THREADS, ahead)
    return {**sides, "torch.index_select": partial(run, "torch", THREADS, of_hits)}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "dir", "json", "rounds", "seed")
    add = parser.add_argument
    add("--bytes", type=int, default=2 << 30, help="size of the features (default: 2 GiB)")
    add(
        "--only",
        choices=["4096", "512", "pipe", "hits"],
        help="run only one; 4096 and 512 are the row sizes of reads",
    )
    add("--batch", type=int, default=8192, help="rows per read")
    add("--seconds", type=float, default=4.0, help="time limit of each run of reads or hits")
    add("--batches", type=int, default=40, help="minibatches per run of the pipe")
    add("--pipe-seconds", type=float, default=15.0, help="time limit of each run of the pipe")
    add(
        "--newest",
        type=Path,
        metavar="DIRECTORY",
        help="compare with GraphBolt's newest features, built in DIRECTORY",
    )
    args = parser.parse_args(argv)
    if args.small:
        args.bytes, args.batch, args.seconds, args.batches, args.rounds = 16 << 20, 512, 0.2, 8, 1
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where the fresh processes find graphbolt_side
    found: dict[str, Any] = {}
    common = {"batch": args.batch, "seconds": args.seconds, "batches": args.batches, "seed": args.seed}
    for row_bytes in (4096, 512):
        wanted = [
            q
            for q in (str(row_bytes), "pipe", "hits")
            if args.only in (None, q) and (q != "pipe" or row_bytes == 4096)
        ]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-graphbolt-") as directory:
            config = {**common, **write(Path(directory), args.bytes // row_bytes, row_bytes // 4)}
            if str(row_bytes) in wanted:
                of_reads = {**config, "what": "reads"}
                sides = {
                    "gids": partial(run, "gids", THREADS, of_reads),
                    "gids_fetch": partial(run, "gids_fetch", THREADS, of_reads),
                    STOCK: partial(run, "graphbolt", THREADS, of_reads),
                    "GraphBolt, 16 threads": partial(run, "graphbolt", 16, of_reads),
                }
                if args.newest:
                    newest = {**of_reads, "newest": str(args.newest)}
                    sides[NEWEST] = partial(run, "newest", THREADS, newest)
                found[str(row_bytes)] = compare(f"{row_bytes} B rows", sides, args.rounds)
                device = random_reads([config["shard"]], page_bytes=row_bytes, seconds=args.seconds)
                print(f"{'':<10} {'the device, engine alone':<22} {device.reads_per_s:>9.0f} reads/s")
            if "pipe" in wanted:
                graph = write_graph(Path(directory) / "graph.npz", config["rows"], args.seed)
                of_pipe = {**config, "what": "pipe", "graph": str(graph), "seconds": args.pipe_seconds}
                sides = {
                    "gids": partial(run, "gids", THREADS, of_pipe),
                    STOCK: partial(run, "graphbolt", THREADS, of_pipe),
                }
                found["pipe"] = compare("pipe", sides, args.rounds)
            if "hits" in wanted:
                title = f"hits, {row_bytes} B"
                found[title] = compare(title, sides_of_hits(config, args.newest), args.rounds)
    write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
