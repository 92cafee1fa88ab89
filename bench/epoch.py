"""How much faster is an epoch through DGL with gids than with stock DGL on memory-mapped features?

    python bench/epoch.py             # 8.6 GB of features twice on disk, 3 pairs, ten minutes
    python bench/epoch.py --small     # a minute; only shows that it works

Baselines, with rows aligned to pages in the file: stock DGL on ``np.load(mmap_mode)`` in ``g.ndata`` with
Linux's default read-ahead of 128 KiB (set if permitted; stopped after a minute and compared by rows per
second), and the same with MADV_RANDOM, which few users set. All sides have the same graph, seeds, sampler,
model, workers and threads, and run in fresh processes with a cold page cache. Their memory, page cache
included, is limited to what they use before they open the features, plus the memory of a trial training, plus
a share of the features. Sides run in alternating order; results are medians. A side of stock that fails is
omitted. The epoch is measured from opening the features to the last step. Rows of all minibatches are
compared with the source. The limit of any loader is printed too: the greater of the time that the device
needs for gids' reads and writes, and the CPU time divided by the cores. If packs were used, that needs fio.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from harness import (
    DEFAULT_READ_AHEAD_BYTES,
    alternate,
    disk_rates,
    integers,
    make_parser,
    median_ratio,
    read_ahead,
    write_json,
)

from gids.bench.arguments import READS
from gids.bench.probe import random_reads
from gids.bench.quickstart import table
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.measure.choices import describe_choices
from gids.measure.isolation import read_ahead_bytes
from gids.measure.sides import EpochConfig, EpochResult, run_gids, run_other, why_no_limit
from gids.store import FeatureStore

ALLOWANCE_BYTES = 300 * 10**6  # what a process may take beyond what stats()["memory"] lists


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dir", "json", "keep", "seed")
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
    add("--reads", choices=READS, default="auto", help="how gids reads (default: auto)")
    add(
        "--memory-share",
        type=float,
        default=0.25,
        help="memory of both sides as a share of the features (default: 0.25)",
    )
    add("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.small:
        args.size_gb, args.batches, args.batch_size, args.rounds = 0.05, 4, 8, 1
    return args


def make_files(args: argparse.Namespace, directory: Path) -> GraphSpec:
    spec = GraphSpec(
        node_count=int(args.size_gb * 1e9) // (4 * args.dim),
        degree=args.degree,
        dim=args.dim,
        train_count=args.batches * args.batch_size,
        val_count=4 * args.batch_size,
        seed=args.seed,
    )
    if not (directory / "graph.gids").exists():
        write_graph(directory / "graph", spec)
        if gids_command(["convert", str(directory / "graph"), str(directory / "graph.gids"), "--quiet"]) != 0:
            raise SystemExit("the conversion failed")
    return spec


def compare(args: argparse.Namespace, directory: Path) -> bool:
    spec = make_files(args, directory)
    memory_bytes = int(spec.feature_bytes * args.memory_share)
    if args.small:
        memory_bytes = max(memory_bytes, 384 << 20)
    ours = EpochConfig(
        side="gids",
        source=str(directory / "graph"),
        dataset=str(directory / "graph.gids"),
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
    stock = replace(ours, side="stock")
    no_limit = why_no_limit()
    print(
        f"{spec.node_count:,} rows of {spec.row_bytes} B ({spec.feature_bytes / 1e9:.1f} GB), "
        f"{args.batches} minibatches of {args.batch_size} seeds, fanouts {args.fanouts}, "
        f"{os.cpu_count()} cores; "
        + (f"MEMORY NOT LIMITED: {no_limit}" if no_limit else f"memory limit {memory_bytes / 1e6:,.0f} MB"),
        flush=True,
    )

    def run(config: EpochConfig) -> EpochResult | None:
        """None where stock failed, as it may for want of memory."""
        result: EpochResult | str
        if config.side == "gids":
            result = run_gids(config, say=print, limited=not no_limit)
            headroom.append(result.headroom_bytes or 0)
        else:
            config = replace(config, headroom_bytes=headroom[-1] if headroom else 0)
            result = run_other("stock DGL", config, limited=not no_limit)
        if isinstance(result, str):
            print(f"  {result}", flush=True)
            return None
        print(f"  {config.side}: {result.seconds:.2f} s, {result.rows_per_s:,.0f} rows/s", flush=True)
        return result

    def run_as_is() -> EpochResult | None:
        with read_ahead(directory, DEFAULT_READ_AHEAD_BYTES):
            around.append(read_ahead_bytes(directory))
            return run(replace(stock, random_access=False, most_seconds=60, val_nodes=0))

    around: list[int | None] = []
    headroom: list[int] = []
    sides = {"gids": lambda: run(ours), "stock": run_as_is, "stock, MADV_RANDOM": lambda: run(stock)}
    rounds = alternate(sides, args.rounds)
    results = {name: [r for r in found if r is not None] for name, found in rounds.items()}
    medians = {name: _median_run(runs) for name, runs in results.items() if runs}
    print("\n" + table([(f"{name}, {run.batches} batches", run) for name, run in medians.items()]))
    rate = _device_rate(args, directory)
    read_s = _read_seconds(results["gids"], rate, directory)
    correct = _print_verdict(rounds, read_s, around[0])
    write_json(
        args.json,
        {
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
            "feature_bytes": spec.feature_bytes,
            "memory_bytes": 0 if no_limit else memory_bytes,
            "device_pages_per_s": rate,
            "runs": {name: [asdict(run) for run in runs] for name, runs in results.items()},
        },
    )
    return correct


def _median_run(runs: list[EpochResult]) -> EpochResult:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _device_rate(args: argparse.Namespace, directory: Path) -> float:
    table_ = FeatureStore(directory / "graph.gids").table("feat")
    seconds = 0.2 if args.small else 5
    return random_reads(table_.shard_paths, page_bytes=table_.page_bytes, seconds=seconds).reads_per_s


def _read_seconds(runs: list[EpochResult], pages_per_s: float, directory: Path) -> float | None:
    """What the device needs for the median run's pages, and for its packs; None if that is unknown."""
    [shard] = FeatureStore(directory / "graph.gids").table("feat").shard_paths
    seconds = median(run.loader["pages_read"] for run in runs) / pages_per_s
    read, written = (
        median(run.loader["packs"][key] for run in runs) for key in ("bytes_read", "bytes_written")
    )
    if not read:
        return seconds
    rates = disk_rates(shard, directory)
    return None if rates is None else seconds + read / rates["read"] + written / rates["write"]


def _print_verdict(
    rounds: dict[str, list[EpochResult | None]], read_s: float | None, around: int | None
) -> bool:
    results = {name: [run for run in found if run is not None] for name, found in rounds.items()}
    gids = results["gids"]

    def speed_up(side: str) -> str:
        """The median of the rounds in which the side ended."""
        pairs = [(ours, other) for ours, other in zip(gids, rounds[side], strict=True) if other]
        if not pairs:
            return "unknown, as it failed"
        ratio = median_ratio([ours.rows_per_s for ours, _ in pairs], [run.rows_per_s for _, run in pairs])
        return f"{ratio:.1f} x"

    read_around = "an unknown read-ahead" if around is None else f"a read-ahead of {around >> 10:,} KiB"
    print(f"\nspeed-up over stock as it is, with {read_around}: {speed_up('stock')} (target 5, aim 8)")
    print(f"speed-up over stock with MADV_RANDOM: {speed_up('stock, MADV_RANDOM')}")
    cores = os.cpu_count() or 1
    cpu_s = median(run.cpu_seconds for run in gids) / cores
    epoch_s = median(run.seconds for run in gids)
    if read_s is None:
        print(f"epoch {epoch_s:.2f} s; how long the device needs for packs is unknown without fio")
    else:
        print(
            f"epoch over max(device time, CPU time / cores): {epoch_s / max(read_s, cpu_s):.2f} "
            f"(aim 1.15 with --reads random): {epoch_s:.2f} s, device {read_s:.2f} s, CPU {cpu_s:.2f} s"
        )
    if gids[0].choices:
        print(f"gids read {describe_choices(gids[0].choices)}")
    grown = max(run.peak_rss_bytes - run.base_rss_bytes for run in gids)
    listed = max(sum(run.loader["memory"].values()) for run in gids)
    verdict = "within" if grown <= listed + ALLOWANCE_BYTES else "BEYOND"
    print(
        f"memory: RSS grew by {grown / 1e6:,.0f} MB at most; stats()['memory'] lists {listed / 1e6:,.0f} MB, "
        f"+ {ALLOWANCE_BYTES / 1e6:.0f} MB allowed: {verdict}"
    )
    wrong = sum(run.wrong_rows for runs in results.values() for run in runs)
    compared = sum(run.compared_rows for runs in results.values() for run in runs)
    print(f"rows that differ from the source: {wrong} of {compared:,} compared")
    warmest = max(run.cached_before for runs in results.values() for run in runs)
    print(f"features in the page cache at a start: {warmest:.2%} at most")
    return wrong == 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    directory = args.dir / f"gids-epoch-{args.size_gb}"
    directory.mkdir(exist_ok=args.keep)
    try:
        return 0 if compare(args, directory) else 1
    finally:
        if not args.keep:
            shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
