"""How much faster does gids read rows than torch on a memory-mapped tensor, and than GraphBolt's features?

    python bench/rows.py mapped                  # 4.3 GB on disk, three minutes
    tools/graphbolt_env.sh DIRECTORY --bench     # rows.py graphbolt: 4.3 GB of disk, ten minutes
    python bench/rows.py mapped --small          # seconds; only shows that it works

mapped: random distinct rows of 4 KiB, in minibatches, without a cache. Baseline: ``features[ids]`` on a
memory-mapped tensor with 1, 2 and 16 threads, and with MADV_RANDOM.

graphbolt, in an environment in which DGL 2.1.0's GraphBolt can be imported:

* reads (rows of 4096 and of 512 B): ``read(ids)`` of gids.graphbolt.Feature, without a cache, against that of
  GraphBolt's TorchBasedFeature on a memory map, as OnDiskDataset makes it with ``in_memory: false``. Random
  distinct rows, so that no cache helps. 2 threads; GraphBolt also with 16.
* pipe (4096 B): ``gids_fetch``, window 16, against ``fetch_feature`` in the same pipe: GraphBolt samples
  neighbors. Some rows are read repeatedly. A side that is not done after ``--pipe-seconds`` is stopped, as
  GraphBolt's is with a slow disk, and rates are compared.

All sides have the same rows, GraphBolt's in a .npy file. They run in fresh processes with a cold page cache,
Linux's default read-ahead of 128 KiB (set if permitted), and the same memory (limited if permitted): what
they use before they open the rows plus a quarter of the rows, page cache included. Every row is compared with
the source, outside the measured time. Sides run in alternating order; ratios are medians of the rounds'
ratios. The rate of the engine alone is printed too.
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
from harness import DEFAULT_READ_AHEAD_BYTES, Figures, Script, alternate, read_ahead, run_limited

import gids.io
from gids.bench.bandwidth import random_reads
from gids.store import FeatureStore
from gids.store.names import NODE
from gids.write import DatasetWriter

THREADS = 2  # of gids, and of the baselines that have targets
BARS = {f"mapped, 4096 B, mapped, {THREADS} threads": 10.0}
DEGREE = 12
Sides = dict[str, Any]


def run(side: str, threads: int, config: dict[str, Any], **options: Any) -> dict[str, float]:
    """Run a side of rows_side.py."""
    for path in (config["shard"], config.get("npy")):
        if path:
            gids.io.drop_page_cache(path)
    with read_ahead(Path(config["shard"]), DEFAULT_READ_AHEAD_BYTES):
        return run_limited("rows_side", {**config, **options, "side": side, "threads": threads})


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
    for side, values in rates.items():
        cpu_us = 1e6 * median(r["cpu_s_per_row"] for r in results[side])
        figures.add(f"{name}, {side}", median(values), "rows/s", note=f"{cpu_us:.2f} us of CPU a row")
    for other in list(sides)[1:]:
        bar = BARS.get(f"{name}, {other}")
        figures.ratio(f"{name}, gids over {other}", rates["gids"], rates[other], bar=bar)


def sides_of_mapped(config: dict[str, Any], threads: Sequence[int]) -> Sides:
    return {
        "gids": partial(run, "gids_loader", THREADS, config),
        **{f"mapped, {n} threads": partial(run, "mapped", n, config, advised=False) for n in threads},
        **{
            f"mapped, advised, {n} threads": partial(run, "mapped", n, config, advised=True)
            for n in threads
            if n > 1
        },
    }


def sides_of_graphbolt(config: dict[str, Any], threads: Sequence[int]) -> Sides:
    stock = {f"GraphBolt, {n} threads": partial(run, "graphbolt", n, config) for n in threads}
    return {"gids": partial(run, "gids", THREADS, config), **stock}


def measure(args: argparse.Namespace, figures: Figures, row_bytes: int, whats: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-rows-") as folder:
        directory, rows, dim = Path(folder), args.rows or args.bytes // row_bytes, row_bytes // 4
        features = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, dim)  # row i holds i
        with DatasetWriter(directory / "rows.gids") as writer:
            writer.write_table("node", NODE, "feat", features)
        [shard] = FeatureStore(directory / "rows.gids").table("feat").shard_paths
        config: dict[str, Any] = {"dataset": str(directory / "rows.gids"), "shard": str(shard)}
        config |= {"rows": rows, "dim": dim}
        config |= {name: getattr(args, name) for name in ("batch", "seconds", "batches", "seed")}
        if args.question == "graphbolt":
            config |= {"npy": str(directory / "rows.npy"), "graph": str(directory / "graph.npz")}
            np.save(directory / "rows.npy", features.numpy())
            if "pipe" in whats:
                write_graph(directory / "graph.npz", rows, args.seed)
        for what in whats:
            if what == "mapped":
                sides = sides_of_mapped(config, [THREADS] if args.small else [1, THREADS, 16])
            elif what == "reads":
                sides = sides_of_graphbolt(config, [THREADS, 16])
            else:
                sides = sides_of_graphbolt({**config, "seconds": args.pipe_seconds, "pipe": True}, [THREADS])
            compare(figures, f"{what}, {row_bytes} B", sides, args.rounds)
            if what != "pipe":
                device = random_reads([shard], page_bytes=row_bytes, seconds=args.seconds)
                figures.add(f"{what}, {row_bytes} B, the engine alone", device.reads_per_s, "reads/s")


def mapped(args: argparse.Namespace, figures: Figures) -> None:
    measure(args, figures, 4096, ["mapped"])


def graphbolt(args: argparse.Namespace, figures: Figures) -> None:
    measure(args, figures, 4096, ["reads", "pipe"])
    measure(args, figures, 512, ["reads"])


if __name__ == "__main__":
    script = Script(__doc__, "dir", "rounds", "seed", questions={"mapped": mapped, "graphbolt": graphbolt})
    option = script.option
    text = "size of the features (default: 4 GiB; graphbolt: 2 GiB)"
    option("bytes", text=text, type=int, small=16 << 20)
    option("rows", text="number of rows, in place of --bytes", type=int)
    option("batch", 8192, "rows per read", small=512)
    option("seconds", 4.0, "time limit of each run of reads", small=0.2)
    option("batches", 40, "minibatches per run of the pipe", small=8)
    option("pipe-seconds", 15.0, "time limit of each run of the pipe")
    script.defaults("mapped", bytes=4 << 30)
    script.defaults("graphbolt", bytes=2 << 30)
    script.run()
