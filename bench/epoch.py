"""How much faster is an epoch through DGL with gids than with stock DGL on memory-mapped features?

    python bench/epoch.py             # 8.6 GB of features on disk, 3 pairs, ten minutes
    python bench/epoch.py --small     # seconds, one baseline; only shows that it works
    python bench/epoch.py --hetero    # an R-GCN on the features of papers and authors

Baselines map the dataset's shards, whose rows are aligned to pages: stock DGL with these in ``g.ndata`` and
Linux's default read-ahead of 128 KiB (set if permitted), and the same with MADV_RANDOM, which few users set.
They are stopped after a minute and compared by rows per second. All sides have the same graph, seeds, sampler
and model, and run in fresh processes with a cold page cache. gids gets memory for a quarter of the features.
Stock gets as much for its process, page cache included, or what the process of gids grew by, if that is more.
Sides run in alternating order; results are medians. A side of stock that fails is omitted.

The epoch is measured from opening the features to the last step. --plot draws its stages: sampling;
aggregation, which is what training waits for beyond that; training. Nothing is transferred on a CPU. Rows of
all minibatches are compared with the dataset. The limit of any loader is printed too: the greater of the time
that the device needs for gids' reads and writes, and the CPU time divided by the cores. If packs were used,
that needs fio.

Figures 3, 5, 13 and 14 of Park et al., "GIDS", PVLDB 17(6), 2024.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from graphs import make_dataset
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    Figures,
    Script,
    alternate,
    device_seconds,
    read_ahead,
    read_ahead_bytes,
)

from gids.bench.epoch import comparable
from gids.bench.isolation import why_no_limit
from gids.bench.plot import plot_bars
from gids.bench.sides import ADVISED, OURS, PLAIN, Comparison, EpochConfig, EpochResult
from gids.convert.synthetic import TWO_RELATIONS, GraphSpec
from gids.loader.stats import describe_choices
from gids.store import FeatureStore, Table

ALLOWANCE_BYTES = 300 * 10**6  # what a process may take beyond what stats()["memory"] lists
DIM = 1024  # float32 per row
STOCK_S = 60.0  # time limit of the baselines

STAGES = ("sampling", "aggregation", "training")

Rounds = dict[str, list[EpochResult | None]]
"""By side; None where stock DGL failed."""


def open_store(args: argparse.Namespace, directory: Path) -> FeatureStore:
    """The dataset; with --hetero, half as many authors as papers."""
    if (path := directory / "graph.gids").exists():
        return FeatureStore(path)
    spec = GraphSpec(
        node_count=int(args.size_gb * 1e9) // ((6 if args.hetero else 4) * DIM),
        degree=16.0,
        dim=DIM,
        train_count=args.batches * args.batch_size,
        seed=args.seed,
    )
    return make_dataset(directory, spec, relations=TWO_RELATIONS if args.hetero else ())


def run_sides(args: argparse.Namespace, store: FeatureStore) -> tuple[Rounds, int | None]:
    """Returns the results, and the read-ahead in bytes of stock DGL without advice."""
    memory_bytes = max(int(args.size_gb * 1e9 / 4), 384 << 20 if args.small else 0)
    ours = EpochConfig(
        side=OURS,
        dataset=str(store.path),
        tables=tuple(sorted(store.tables, reverse=True)),  # papers have classes
        fanouts=tuple(args.fanouts),
        batch_size=args.batch_size,
        hidden=64 if args.hetero else 32,
        batches=args.batches,
        seed=args.seed,
        memory_bytes=memory_bytes,
        source={"reads": args.reads},
    )
    for table in store.tables.values():
        print(f"{table.name}: {table.row_count:,} rows of {table.row_bytes} B")
    no_limit = why_no_limit()
    limit = f"MEMORY NOT LIMITED: {no_limit}" if no_limit else f"memory limit {memory_bytes / 1e6:,.0f} MB"
    print(f"{os.cpu_count()} cores; {limit}", flush=True)
    module = "rgcn_side" if args.hetero else "epoch_side"
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    comparison = Comparison(limited=not no_limit, say=print, module=module)
    configs = {OURS: ours, ADVISED: replace(ours, side=ADVISED, most_seconds=STOCK_S)}
    if not args.small:  # most of the time goes into the start of processes
        configs[PLAIN] = replace(ours, side=PLAIN, most_seconds=STOCK_S)
    folder = Path(store.path)
    with read_ahead(folder, DEFAULT_READ_AHEAD_BYTES):  # MADV_RANDOM and gids do without
        sides = {name: partial(comparison.run, config) for name, config in configs.items()}
        return alternate(sides, args.rounds), read_ahead_bytes(folder)


def report(args: argparse.Namespace, figures: Figures, rounds: Rounds, around: int | None) -> None:
    runs = {side: [run for run in results if run is not None] for side, results in rounds.items()}
    middle = {side: sorted(r, key=lambda run: run.seconds)[len(r) // 2] for side, r in runs.items() if r}
    stages = dict.fromkeys(stage for run in middle.values() for stage in run.stages)
    rows = [
        {
            "": side,
            "rows/s": run.rows_per_s,
            "epoch s": run.seconds,
            "CPU s": run.cpu_seconds,
            "batches": run.batches,
            **{f"{stage} s": run.stages.get(stage, 0.0) for stage in stages},
            "read": run.read_bytes or 0,
            "written": run.written_bytes or 0,
            "hit ratio": "-" if run.hit_ratio is None else run.hit_ratio,
        }
        for side, run in middle.items()
    ]
    prefix = "papers and authors: " if args.hetero else ""
    figures.table(f"{prefix}medians", rows)
    if args.plot:
        report_stages(args, figures, prefix, middle)
    read_around = "unknown" if around is None else f"{around >> 10:,} KiB"
    for side in list(rounds)[1:]:
        pairs = [
            (a.rows_per_s, b.rows_per_s)
            for a, b in zip(rounds[OURS], rounds[side], strict=True)
            if a and b and comparable(b.batches, args.batches)
        ]
        if pairs:  # the rounds in which the side ended, or was stopped late enough
            bar = 5.0 if side == PLAIN and not args.hetero else None
            note = f"read-ahead {read_around}, aim 8" if side == PLAIN else ""
            name = f"{prefix}rows/s, gids over {side}"
            figures.ratio(name, *zip(*pairs, strict=True), bar=bar, note=note)


def report_stages(
    args: argparse.Namespace, figures: Figures, prefix: str, runs: dict[str, EpochResult]
) -> None:
    """Draw the stages; the rates of requests, and of rows that training takes, with gids."""
    for stage in ("sampling", "training"):
        run = runs[OURS]
        figures.add(f"{prefix}gids: {stage} alone", run.rows / run.stages[stage], "rows/s")
    for side, run in runs.items():
        for stage in STAGES:
            figures.add(f"{prefix}{side}: {stage}", 1e3 * run.stages[stage] / run.batches, "ms/minibatch")
    bars = {side: {s: 1e3 * run.stages[s] / run.batches for s in STAGES} for side, run in runs.items()}
    plot_bars(args.plot, "Time of a minibatch by stage", bars, "ms")


def report_limits(args: argparse.Namespace, figures: Figures, runs: list[EpochResult], table: Table) -> None:
    """Compare the epochs of gids with what device and cores allow, and their memory with what they list."""
    epoch_s = median(run.seconds for run in runs)
    cpu_s = median(run.cpu_seconds for run in runs) / (os.cpu_count() or 1)
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    device_s = device_seconds(table, middle.loader, 0.2 if args.small else 5)
    most = 1.15 if args.reads == "random" else None
    note = f"{epoch_s:.2f} s, device {device_s:.2f} s, CPU {cpu_s:.2f} s"
    name = "epoch over max(device time, CPU time / cores)"
    figures.add(name, epoch_s / max(device_s, cpu_s), "x", most=most, note=note)
    if runs[0].choices:
        print(f"gids read {describe_choices(runs[0].choices)}")
    grown = max(run.peak_rss_bytes - run.base_rss_bytes for run in runs)
    listed = max(sum(run.loader["memory"].values()) for run in runs)
    note = f"RSS grew by {grown / 1e6:,.0f} MB at most, {listed / 1e6:,.0f} MB are listed"
    name = "memory beyond stats()['memory']"
    figures.add(name, max(0, grown - listed) / 1e6, "MB", most=ALLOWANCE_BYTES / 1e6, note=note)


def epoch(args: argparse.Namespace, figures: Figures) -> int:
    directory = args.dir / f"gids-epoch-{'typed-' * args.hetero}{args.size_gb}"
    directory.mkdir(exist_ok=args.keep, parents=True)
    try:
        store = open_store(args, directory)
        rounds, around = run_sides(args, store)
        runs = [run for results in rounds.values() for run in results if run is not None]
        report(args, figures, rounds, around)
        if not args.hetero:
            report_limits(args, figures, [run for run in runs if run.side == OURS], store.table("feat"))
    finally:
        if not args.keep:
            shutil.rmtree(directory)
    wrong, compared = sum(run.wrong_rows for run in runs), sum(run.compared_rows for run in runs)
    print(f"rows that differ from the dataset: {wrong} of {compared:,} compared")
    print(f"features in the page cache at a start: {max(run.cached_before for run in runs):.2%} at most")
    return int(wrong > 0)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "keep", "seed", "plot")
    option = script.option
    option("size-gb", 8.6, "size of the features in 1e9 bytes", small=0.05)
    option("batches", 120, small=4)
    option("batch-size", 256, small=8)
    option("fanouts", [4, 4, 4])
    option("reads", "auto", "how gids reads", choices=["auto", "random", "pack"])
    option("rounds", 3, small=1)
    option("hetero", text="two node types: papers and authors", action="store_true")
    script.run(epoch)
