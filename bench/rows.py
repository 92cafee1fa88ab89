"""How much faster does gids read rows than torch, PyG and DGL on a memory-mapped tensor, and than GraphBolt?

    python bench/rows.py mapped                  # 4.3 GB on disk, three minutes
    python bench/rows.py pyg                     # 4.3 GB on disk, nine minutes
    python bench/rows.py memory --plot epoch-by-memory.png  # 2.2 GB on disk, ten minutes
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

pyg: an epoch of minibatches, without training, by gids.pyg.NeighborLoader and by PyG over ``Data`` with a
memory-mapped ``x``, with 0 and 2 workers, with and without MADV_RANDOM. PyG's NeighborLoader needs pyg-lib or
torch-sparse. Without both, PyG's NodeLoader, which takes any sampler, has that of gids: it is PyG's loader,
its workers and its fetching of rows, with the minibatches of the gids side. The output says which. Rows of 4
KiB; and of 512 B, also with ``reads="pack"``. The clock starts before the features are opened. PyG is stopped
after ``--peer-seconds``, and rates are compared. 64 rows of each minibatch are compared with the source. gids
gets memory for a quarter of the features, and PyG at least as much as gids took, by a control group.

memory: seconds of such an epoch by the memory for features, which is a share of them: gids, and PyG and DGL
on maps with MADV_RANDOM and without workers. Rows of 4 KiB.

In mapped and graphbolt all sides have the same rows, GraphBolt's in a .npy file. All run in fresh processes
with a cold page cache, and Linux's default read-ahead of 128 KiB (set if permitted). Those of mapped and
graphbolt have the same memory (limited if permitted): what they use before they open the rows plus a quarter
of the rows, page cache included. Every row is compared with the source, outside the measured time. Sides run
in alternating order; ratios are medians of the rounds' ratios. The rate of the engine alone is printed too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from graphs import make_dataset
from harness import DEFAULT_READ_AHEAD_BYTES, Figures, Script, alternate, read_ahead, run_limited

import gids.io
from gids.bench.bandwidth import random_reads
from gids.bench.epoch import comparable
from gids.bench.isolation import why_no_limit
from gids.bench.plot import Curve, check_plotting, plot_curves
from gids.bench.sides import ADVISED, OURS, PLAIN, Comparison, EpochConfig, EpochResult
from gids.convert.synthetic import GraphSpec
from gids.store import FeatureStore
from gids.store.names import NODE
from gids.write import DatasetWriter

THREADS = 2  # of gids, and of the baselines that have targets
BARS = {f"mapped, 4096 B, mapped, {THREADS} threads": 10.0}
DEGREE = 12
PYG, DGL = "gids.bench.pyg_side", "gids.bench.dgl_side"
EPOCH = {"fanouts": (4, 4, 4), "hidden": 0}  # hidden 0: without training
SEEDS = {4096: 128, 512: 512}  # of a minibatch, by the bytes of a row
LEAST_BYTES = 96 << 20  # of memory for features
Sides = dict[str, Any]
Rounds = dict[str, list[EpochResult | None]]
"""By side; None where it failed."""


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


def open_epoch(args: argparse.Namespace, folder: Path, row_bytes: int) -> tuple[EpochConfig, int]:
    """The side of gids in an epoch over a new dataset; the bytes of its features."""
    nodes, seeds = (args.rows or args.bytes // row_bytes), SEEDS[row_bytes] // (16 if args.small else 1)
    spec = GraphSpec(
        nodes, degree=DEGREE, dim=row_bytes // 4, train_count=args.batches * seeds, seed=args.seed
    )
    store = make_dataset(folder, spec)
    config = EpochConfig(
        side=OURS,
        dataset=str(store.path),
        tables=(store.table().name,),
        batch_size=seeds,
        batches=args.batches,
        seed=args.seed,
        **EPOCH,
    )
    return config, nodes * row_bytes


def start_comparison() -> Comparison:
    """Says what the sides are, too."""
    from gids.bench.pyg_side import STOCK  # needs PyG

    no_limit = why_no_limit()
    print(f"stock PyG is {STOCK}")
    print(f"MEMORY NOT LIMITED: {no_limit}" if no_limit else "memory is limited", flush=True)
    return Comparison(limited=not no_limit, say=print, module=PYG)


def check(rounds: Rounds) -> None:
    """Raise AssertionError if a row differs from the source. Says what was not cold."""
    for side, results in rounds.items():
        runs = [run for run in results if run is not None]
        assert not any(run.wrong_rows for run in runs), f"rows of {side} differ from the source"
        if cached := max((run.cached_before for run in runs), default=0.0):
            print(f"{side}: {cached:.2%} of the features in the page cache at a start")


def sides_of_pyg(ours: EpochConfig, args: argparse.Namespace, *, short_rows: bool) -> dict[str, EpochConfig]:
    """The configurations by side."""
    sides = {"gids": ours}
    if short_rows:
        sides["gids, packs"] = replace(ours, source={"reads": "pack"})
    advice = {ADVISED: ", MADV_RANDOM"} if short_rows or args.small else {ADVISED: ", MADV_RANDOM", PLAIN: ""}
    for side, advised in advice.items():
        stock = replace(ours, side=side, most_seconds=args.peer_seconds)
        for workers in (0, 2):
            sides[f"PyG{advised}, {workers} workers"] = replace(stock, source={"num_workers": workers})
    return sides


def pyg(args: argparse.Namespace, figures: Figures) -> None:
    for row_bytes, size in (4096, args.bytes), (512, args.bytes // 2):
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-rows-") as folder:
            sizes = argparse.Namespace(**{**vars(args), "bytes": size})
            ours, feature_bytes = open_epoch(sizes, Path(folder), row_bytes)
            ours = replace(ours, memory_bytes=max(feature_bytes // 4, LEAST_BYTES))
            configs, comparison = sides_of_pyg(ours, args, short_rows=row_bytes < 4096), start_comparison()
            with read_ahead(Path(folder), DEFAULT_READ_AHEAD_BYTES):
                sides = {side: partial(comparison.run, config) for side, config in configs.items()}
                rounds: Rounds = alternate(sides, args.rounds)
        check(rounds)
        title = f"epoch of PyG, {row_bytes} B"
        for side, results in rounds.items():
            if runs := sorted((run for run in results if run), key=lambda run: run.rows_per_s):
                middle = runs[len(runs) // 2]
                note = f"{middle.batches} of {args.batches} minibatches in {middle.seconds:.1f} s"
                figures.add(f"{title}, {side}", middle.rows_per_s, "rows/s", note=note)
        for mine, other in product(rounds, rounds):
            if configs[mine].side == OURS != configs[other].side:
                rates = [
                    (a.rows_per_s, b.rows_per_s)
                    for a, b in zip(rounds[mine], rounds[other], strict=True)
                    if a and b and comparable(b.batches, args.batches)
                ]
                if rates:  # of the rounds in which the side ended, or was stopped late enough
                    figures.ratio(f"{title}, {mine} over {other}", *zip(*rates, strict=True))


def memory(args: argparse.Namespace, figures: Figures) -> None:
    if args.plot:
        check_plotting()
    epoch_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-rows-") as folder:
        ours, feature_bytes = open_epoch(args, Path(folder), 4096)
        for share in map(Fraction, args.shares):
            ours = replace(ours, memory_bytes=max(int(share * feature_bytes), LEAST_BYTES))
            stock = replace(ours, side=ADVISED, most_seconds=args.peer_seconds)
            comparison = start_comparison()
            sides = {
                "gids": partial(comparison.run, ours),
                "PyG on a map, MADV_RANDOM": partial(comparison.run, stock),
                "DGL on a map, MADV_RANDOM": partial(comparison.run, stock, DGL),
            }
            rounds: Rounds = alternate(sides, args.rounds)
            check(rounds)
            for side, results in rounds.items():
                runs = [run for run in results if run is not None]
                seconds = [run.seconds * args.batches / run.batches for run in runs]
                stopped = any(run.batches < args.batches for run in runs)
                epoch_s.setdefault(side, []).append(median(seconds) if seconds else np.nan)
                name = f"epoch with memory for {share} of the features, {side}"
                figures.add(name, epoch_s[side][-1], "s", note="extrapolated" if stopped else "")
    if args.plot:
        shares = [float(Fraction(share)) for share in args.shares]
        curves: list[Curve] = [(side, shares, values) for side, values in epoch_s.items()]
        gigabytes = f"{feature_bytes / 1e9:.1f} GB of features in rows of 4 KiB"
        axes = "memory for features, as a share of them", "seconds to load an epoch"
        plot_curves(args.plot, "Loading an epoch, by memory", {gigabytes: curves}, axes)


if __name__ == "__main__":
    questions = {"mapped": mapped, "pyg": pyg, "memory": memory, "graphbolt": graphbolt}
    script = Script(__doc__, "dir", "plot", "seed", questions=questions)
    option = script.option
    text = "size of the features (default: 4 GiB; pyg and graphbolt: 2 GiB; memory: 1 GiB)"
    option("bytes", text=text, type=int, small=16 << 20)
    option("rows", text="number of rows, in place of --bytes", type=int)
    option("rounds", text="rounds of alternating sides (default: 7; pyg: 3; memory: 2)", type=int, small=1)
    option("batch", 8192, "rows per read", small=512)
    option("seconds", 4.0, "time limit of each run of reads", small=0.2)
    text = "minibatches per run of the pipe, or of an epoch (default: 40; memory: 60)"
    option("batches", text=text, type=int, small=8)
    option("pipe-seconds", 15.0, "time limit of each run of the pipe")
    option("peer-seconds", text="time limit of a run of PyG or DGL (default: 10; memory: 60)", type=float)
    option("shares", text="memory: shares of the features", default=["1/8", "1/4", "1/2", "1"], small=["1"])
    script.defaults("mapped", bytes=4 << 30, rounds=7)
    script.defaults("graphbolt", bytes=2 << 30, rounds=7, batches=40)
    script.defaults("pyg", bytes=2 << 30, rounds=3, batches=40, peer_seconds=10.0)
    script.defaults("memory", bytes=1 << 30, rounds=2, batches=60, peer_seconds=60.0)
    script.run()
