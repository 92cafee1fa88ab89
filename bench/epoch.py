"""How much faster is an epoch through DGL with gids than with stock DGL on memory-mapped features?

    python bench/epoch.py             # 8.6 GB of features twice on disk, 3 pairs, ten minutes
    python bench/epoch.py --small     # a minute; only shows that it works
    python bench/epoch.py --hetero    # papers and authors, with `gids bench epoch`

Baselines, with rows aligned to pages in the file: stock DGL on ``np.load(mmap_mode)`` in ``g.ndata`` with
Linux's default read-ahead of 128 KiB (set if permitted; stopped after a minute and compared by rows per
second), and the same with MADV_RANDOM, which few users set. All sides have the same graph, seeds, sampler,
model, workers and threads, and run in fresh processes with a cold page cache. Their memory, page cache
included, is limited to what they use before they open the features, plus the memory of a trial training, plus
a share of the features. Sides run in alternating order; results are medians. A side of stock that fails is
omitted. The epoch is measured from opening the features to the last step. Rows of all minibatches are
compared with the source. The limit of any loader is printed too: the greater of the time that the device
needs for gids' reads and writes, and the CPU time divided by the cores. If packs were used, that needs fio.

--hetero: Figure 13 of Park et al., "GIDS", PVLDB 17(6), 2024. Runs `gids generate --hetero`, `gids convert`
and `gids bench epoch`: an R-GCN on the features of papers and authors; stock DGL maps the dataset's own
files. --hidden, --workers and --threads do not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from graphs import convert, make_dataset
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    Figures,
    alternate,
    disk_rates,
    integers,
    make_parser,
    read_ahead,
)

from gids.bench.epoch import comparable
from gids.bench.probe import random_reads
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec
from gids.measure.choices import describe_choices
from gids.measure.isolation import read_ahead_bytes
from gids.measure.sides import Comparison, EpochConfig, EpochResult, why_no_limit
from gids.store import FeatureStore, Table

ALLOWANCE_BYTES = 300 * 10**6  # what a process may take beyond what stats()["memory"] lists
GIDS, STOCK, ADVISED = "gids", "stock DGL", "stock DGL with MADV_RANDOM"
Rounds = dict[str, list[EpochResult | None]]
"""By side; None where stock DGL failed."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dir", "keep", "seed")
    add = parser.add_argument
    add("--size-gb", type=float, default=8.6, help="size of the features in 1e9 bytes (default: 8.6)")
    add("--dim", type=int, default=1024, help="float32 features per row (default: 1024)")
    add("--degree", type=float, default=16.0)
    add("--batches", type=int, default=120)
    add("--batch-size", type=int, default=256)
    add("--fanouts", type=integers, default=[4, 4, 4])
    add("--hidden", type=int, default=32, help="width of the hidden layers (default: 32)")
    add("--workers", type=int, default=0, help="num_workers of both sides")
    add("--threads", type=int, default=0, help="OpenMP threads of both sides (default: torch's)")
    add("--window", type=int, default=16)
    add("--reads", choices=["auto", "random", "pack"], default="auto", help="how gids reads (default: auto)")
    add("--memory-share", type=float, default=0.25, help="memory of both sides over features (default: 0.25)")
    add("--rounds", type=int, default=3)
    add("--hetero", action="store_true", help="two node types, with `gids bench epoch`")
    args = parser.parse_args(argv)
    if args.small:
        args.size_gb, args.batches, args.batch_size, args.rounds = 0.05, 4, 8, 1
    return args


def open_store(args: argparse.Namespace, directory: Path) -> FeatureStore:
    if (directory / "graph.gids").exists():
        return FeatureStore(directory / "graph.gids")
    spec = GraphSpec(
        node_count=int(args.size_gb * 1e9) // (4 * args.dim),
        degree=args.degree,
        dim=args.dim,
        train_count=args.batches * args.batch_size,
        val_count=4 * args.batch_size,
        seed=args.seed,
    )
    return make_dataset(directory, spec)


def memory_bytes_of(args: argparse.Namespace) -> int:
    """For the features, of each side."""
    return max(int(args.size_gb * 1e9 * args.memory_share), 384 << 20 if args.small else 0)


def run_sides(args: argparse.Namespace, directory: Path, table: Table) -> tuple[Rounds, int | None]:
    """Returns the results, and the read-ahead in bytes of stock DGL without advice."""
    memory_bytes = memory_bytes_of(args)
    ours = EpochConfig(
        side="gids",
        dataset=str(directory / "graph.gids"),
        tables=(table.name,),
        source=str(directory / "graph"),
        fanouts=tuple(args.fanouts),
        batch_size=args.batch_size,
        hidden=args.hidden,
        batches=args.batches,
        val_nodes=64,
        workers=args.workers,
        threads=args.threads,
        seed=args.seed,
        memory_bytes=memory_bytes,
        gids_memory_bytes=memory_bytes,
        window=args.window,
        reads=args.reads,
    )
    no_limit = why_no_limit()
    print(
        f"{table.row_count:,} rows of {table.row_bytes} B, {os.cpu_count()} cores; "
        + (f"MEMORY NOT LIMITED: {no_limit}" if no_limit else f"memory limit {memory_bytes / 1e6:,.0f} MB"),
        flush=True,
    )
    comparison = Comparison(limited=not no_limit, say=print)
    stock = replace(ours, side="stock")
    as_is = replace(stock, random_access=False, most_seconds=60, val_nodes=0)
    with read_ahead(directory, DEFAULT_READ_AHEAD_BYTES):  # MADV_RANDOM and gids do without
        sides = {
            name: partial(comparison.run, name, config)
            for name, config in ((GIDS, ours), (STOCK, as_is), (ADVISED, stock))
        }
        return alternate(sides, args.rounds), read_ahead_bytes(directory)


def report(
    args: argparse.Namespace, figures: Figures, rounds: Rounds, table: Table, around: int | None
) -> None:
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
    figures.table("medians", rows)
    for side, bar in ((ADVISED, None), (STOCK, 5.0)):
        pairs = [
            (a, b)
            for a, b in zip(rounds[GIDS], rounds[side], strict=True)
            if a and b and comparable(b.batches, args.batches)
        ]
        if pairs:  # the rounds in which the side ended, or was stopped late enough
            ours, theirs = ([run.rows_per_s for run in side_runs] for side_runs in zip(*pairs, strict=True))
            read_around = "unknown" if around is None else f"{around >> 10:,} KiB"
            note = f"read-ahead {read_around}, aim 8" if side == STOCK else ""
            figures.ratio(f"rows/s, gids over {side}", ours, theirs, bar=bar, note=note)
    ours = runs[GIDS]
    epoch_s = median(run.seconds for run in ours)
    cpu_s = median(run.cpu_seconds for run in ours) / (os.cpu_count() or 1)
    device_s = device_seconds(ours, table, 0.2 if args.small else 5)
    if device_s is None:
        print(f"epoch {epoch_s:.2f} s; how long the device needs for packs is unknown without fio")
    else:
        most = 1.15 if args.reads == "random" else None
        note = f"{epoch_s:.2f} s, device {device_s:.2f} s, CPU {cpu_s:.2f} s"
        name = "epoch over max(device time, CPU time / cores)"
        figures.add(name, epoch_s / max(device_s, cpu_s), "x", most=most, note=note)
    if ours[0].choices:
        print(f"gids read {describe_choices(ours[0].choices)}")
    grown = max(run.peak_rss_bytes - run.base_rss_bytes for run in ours)
    listed = max(sum(run.loader["memory"].values()) for run in ours)
    note = f"RSS grew by {grown / 1e6:,.0f} MB at most, {listed / 1e6:,.0f} MB are listed"
    name = "memory beyond stats()['memory']"
    figures.add(name, max(0, grown - listed) / 1e6, "MB", most=ALLOWANCE_BYTES / 1e6, note=note)


def measure_hetero(args: argparse.Namespace, directory: Path, figures: Figures) -> None:
    """Run `gids bench epoch` on N papers and N / 2 authors, and show its results."""
    source, written = directory / "typed", directory / "epoch.json"
    papers = int(args.size_gb * 1e9) // (6 * args.dim)
    options = [
        "--nodes",
        papers,
        "--edges",
        int(args.degree * papers),
        "--dim",
        args.dim,
        "--seed",
        args.seed,
    ]
    path = source.with_suffix(".gids")
    if not path.exists():
        run_gids("generate", source, "--hetero", *options)
        convert(source)
        shutil.rmtree(source)
    options = ["--fanouts", ",".join(map(str, args.fanouts)), "--batch-size", args.batch_size]
    options += ["--batches", args.batches, "--window", args.window, "--reads", args.reads]
    options += ["--sides", "gids,stock-random"] if args.small else []
    options += ["--seed", args.seed, "--repeat", args.rounds, "--memory-limit", memory_bytes_of(args)]
    with read_ahead(directory, DEFAULT_READ_AHEAD_BYTES):
        run_gids("bench", "epoch", path, *options, "--json", written)
    report = json.loads(written.read_text())
    for note in report["notes"]:
        print(f"note: {note}")
    medians = {
        figure["setting"]["side"]: {name: values["median"] for name, values in figure["metrics"].items()}
        for figure in report["figures"]
    }
    columns = {"rows/s": "rows_per_s", "epoch s": "epoch_s", "CPU s": "cpu_s", "batches": "batches"}
    columns |= {"read": "read_bytes", "hit ratio": "hit_ratio"}
    rows = [
        {"": side} | {title: metrics.get(name, "-") for title, name in columns.items()}
        for side, metrics in medians.items()
    ]
    figures.table("papers and authors: medians", rows)
    for side, metrics in medians.items():
        if side != GIDS and comparable(metrics["batches"], args.batches):
            ratio = medians[GIDS]["rows_per_s"] / metrics["rows_per_s"]
            figures.add(f"papers and authors: rows/s, gids over {side}", ratio, "x")


def run_gids(*arguments: object) -> None:
    if gids_command([*map(str, arguments), "--quiet"]) != 0:
        raise SystemExit(f"gids {arguments[0]} failed")


def device_seconds(runs: list[EpochResult], table: Table, probe_s: float) -> float | None:
    """What the device needs for the median run's pages, and for its packs; None if that is unknown."""
    rate = random_reads(table.shard_paths, page_bytes=table.page_bytes, seconds=probe_s).reads_per_s
    seconds = median(run.loader["pages_read"] for run in runs) / rate
    read, written = (
        median(run.loader["packs"][key] for run in runs) for key in ("bytes_read", "bytes_written")
    )
    if not read:
        return seconds
    rates = disk_rates(Path(table.shard_paths[0]), Path(table.shard_paths[0]).parent)
    return None if rates is None else seconds + read / rates["read"] + written / rates["write"]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    directory = args.dir / f"gids-epoch-{args.size_gb}"
    directory.mkdir(exist_ok=args.keep)
    try:
        if args.hetero:
            measure_hetero(args, directory, Figures(args))
            return 0
        table = open_store(args, directory).table("feat")
        rounds, around = run_sides(args, directory, table)
        report(args, Figures(args), rounds, table, around)
    finally:
        if not args.keep:
            shutil.rmtree(directory)
    runs = [run for results in rounds.values() for run in results if run is not None]
    wrong, compared = sum(run.wrong_rows for run in runs), sum(run.compared_rows for run in runs)
    print(f"rows that differ from the source: {wrong} of {compared:,} compared")
    print(f"features in the page cache at a start: {max(run.cached_before for run in runs):.2%} at most")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
