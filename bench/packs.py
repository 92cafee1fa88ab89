"""How much faster are epochs by packs than by random reads, and does ``reads="auto"`` choose the fastest way?

    python bench/packs.py            # 6 GB on disk, about two hours
    python bench/packs.py --small    # half a minute; only shows that it works
    python bench/packs.py --dataset papers.gids --memory-shares 1/4 --batch-sizes 256

Loads minibatches of a synthetic graph, without training. Sides: gids with reads="random" (the window and its
cache), "pack" and "auto"; torch.index_select and DGL's DataLoader on the mapped table, advised
MADV_RANDOM. Every side runs in a fresh process with a cold page cache and, if permitted, the same memory for
features, page cache included, beside what sampling needs. torch and DGL load a few minibatches only. Their
epoch is extrapolated from the second half of these, when the page cache is full. 64 rows of every minibatch
are compared with the table. Settings: row size, memory as a share of the features, seeds per minibatch.

The disk's long reads and writes are measured before each side by packs, by fio if it is installed. The side's
seconds are printed as a multiple of max(bytes / these rates, CPU seconds / cores).
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from graphs import make_dataset
from harness import Figures, Script, disk_rates, least_seconds, run_limited

import gids.io
from gids.bench.features import why_no_array
from gids.bench.isolation import FreshProcessError, why_no_limit
from gids.bench.plot import Curve, plot_curves
from gids.cli.arguments import words
from gids.convert.synthetic import GraphSpec
from gids.loader.stats import describe_choices
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table

OURS = ("random", "pack", "auto")
PEERS = ("torch", "dgl")
TITLES = {"torch": "torch, MADV_RANDOM", "dgl": "DGL, MADV_RANDOM"}
LABELS = {"random": "random reads (window)", "pack": "pack", "auto": "auto", **TITLES}
MOST_OVER_BOUND = 1.25
NEAR = 1.1  # a choice is good if its way takes at most this times the seconds of the fastest
SMALL_MEMORY_BYTES = 24 << 20  # of --small, whose features are smaller than what a loader needs


@dataclass
class Setting:
    """One row of the result. runs: by side; missing: why a side has no run."""

    row_bytes: int
    share: str
    memory_bytes: int
    batch_size: int
    batches: int
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"rows of {self.row_bytes} B, memory {self.share}, {self.batch_size} seeds"

    def seconds(self, side: str) -> float | None:
        """Of all minibatches. If the side loaded fewer, each of the others takes run["late_s"]."""
        run = self.runs.get(side)
        return None if run is None else run["seconds"] + (self.batches - run["batches"]) * run["late_s"]

    def over_bound(self, side: str) -> float | None:
        """Seconds, over the least that disk or cores take; None without packs."""
        run = self.runs.get(side)
        if run is None or not run["written_bytes"] or run["read_bytes"] is None:
            return None
        read, written, cpu_s = run["read_bytes"], run["written_bytes"], run["cpu_s"]
        least_s = least_seconds(run["disk"], read=read, written=written, cpu_s=cpu_s)
        return float(run["seconds"] / least_s)

    def rows_per_s(self, side: str) -> float | None:
        seconds = self.seconds(side)
        if seconds is None:
            return None
        run = self.runs[side]
        return float(run["rows"] / run["batches"] * self.batches / seconds)

    @property
    def chosen(self) -> str:
        """The way that auto chose for most minibatches; "random" if it did not consider packs."""
        counts: dict[str, int] = {}
        for choice in self.runs["auto"]["choices"]:
            counts[choice["way"]] = counts.get(choice["way"], 0) + choice["minibatches"]
        return max(counts, key=lambda way: counts[way], default="random")

    def regret(self) -> float | None:
        """Seconds of the chosen way over those of the fastest one; None if a way was not measured."""
        ways = {way: s for way in OURS[:2] if (s := self.seconds(way)) is not None}
        if "auto" not in self.runs or self.chosen not in ways:
            return None
        return ways[self.chosen] / min(ways.values())

    def row(self) -> dict[str, Any]:
        """A row of the table, with "-" for what was not measured."""
        regret = self.regret()
        return {
            "row B": self.row_bytes,
            "memory": self.share,
            "seeds": self.batch_size,
            **{f"{side} s": self.seconds(side) or "-" for side in (*OURS, *PEERS)},
            **{f"{side} rows/s": self.rows_per_s(side) or "-" for side in (*OURS, *PEERS)},
            **{f"{side} over bound": self.over_bound(side) or "-" for side in OURS[1:]},
            "chosen": self.chosen if "auto" in self.runs else "-",
            "regret": "-" if regret is None else regret,
        }


def datasets(args: argparse.Namespace) -> Iterator[tuple[Path, Table]]:
    """The datasets to measure, with their tables; synthetic ones are made one by one, and removed."""
    if args.dataset is not None:
        tables = [t for t in FeatureStore(args.dataset).tables.values() if t.kind == "node"]
        yield args.dataset, max(tables, key=lambda t: t.page_count * t.page_bytes)
        return
    args.dir.mkdir(parents=True, exist_ok=True)
    for row_bytes in args.row_bytes:
        nodes = min(args.nodes, int(args.size_gb * 1e9) // row_bytes)
        spec = GraphSpec(
            node_count=nodes, degree=8.0 if args.small else 16.0, dim=row_bytes // 4, seed=args.seed
        )
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="gids-packs-") as directory:
            store = make_dataset(Path(directory), spec)
            yield Path(store.path), store.table("feat")


def measure(args: argparse.Namespace, path: Path, table: Table, setting: Setting, figures: Figures) -> None:
    """Run every side once."""
    for side in args.sides:
        if side in PEERS and (reason := why_no_array(table)):
            setting.missing[side] = f"cannot map the table: {reason}"
            continue
        config = {
            "side": side,
            "dataset": str(path),
            "table": table.name,
            "memory_bytes": setting.memory_bytes,
            "fanouts": args.fanouts,
            "batch_size": setting.batch_size,
            "batches": setting.batches if side in OURS else min(setting.batches, args.peer_batches),
            "seed": args.seed,
        }
        packed = side in ("pack", "auto")
        disk = disk_rates(Path(table.shard_paths[0]), path) if packed else None
        gids.io.drop_page_cache(path)
        try:
            run = run_limited("packs_side", config, timeout_s=4 * 3600)
        except FreshProcessError as error:
            setting.missing[side] = error.reason
            continue
        setting.runs[side] = run | {"disk": disk}
        add_run(figures, setting, side)


def add_run(figures: Figures, setting: Setting, side: str) -> None:
    run, seconds = setting.runs[side], setting.seconds(side)
    notes = [
        f"{setting.rows_per_s(side):,.0f} rows/s",
        f"{run['read_bytes'] / 1e6:,.0f} MB read" if run["read_bytes"] is not None else "",
        f"{run['written_bytes'] / 1e6:,.0f} MB written",
        f"first after {run['first_s']:.2f} s",
        f"CPU {run['cpu_s']:.2f} s",
        f"extrapolated from {run['batches']} minibatches" if run["batches"] < setting.batches else "",
        describe_choices(run["choices"]) if run["choices"] else "",
    ]
    name = f"{setting.name}: {TITLES.get(side, side)}"
    figures.add(name, seconds, "s", note=", ".join(filter(None, notes)))
    if bound := setting.over_bound(side):
        figures.add(f"{name} over the least that disk and cores take", bound, "x", most=MOST_OVER_BOUND)


def check(figures: Figures, setting: Setting) -> int:
    """Add the ratios and judge the choice. Returns the number of wrong rows."""
    for ours in OURS[1:]:
        for other in ("random", *PEERS):
            seconds, others = setting.seconds(ours), setting.seconds(other)
            if seconds and others:
                name = f"{setting.name}: {ours} over {TITLES.get(other, other)}"
                figures.add(name, others / seconds, "x")
    if (regret := setting.regret()) is not None:
        name = f"{setting.name}: the chosen way, {setting.chosen}, over the time of the fastest"
        figures.add(name, regret, "x", most=NEAR)
    for side, reason in setting.missing.items():
        print(f"  {TITLES.get(side, side)}: {reason}")
    warm = max((run["cached_before"] for run in setting.runs.values()), default=0.0)
    if warm > 0.01:
        print(f"  WARM: {warm:.0%} of the features were in the page cache at a start")
    wrong = sum(run["wrong_rows"] for run in setting.runs.values())
    compared = sum(run["compared_rows"] for run in setting.runs.values())
    print(f"  rows that differ from the table: {wrong} of {compared:,} compared")
    return wrong


def draw(path: Path, settings: Sequence[Setting]) -> None:
    """A panel per row size and minibatch size, without the sides that were not measured."""
    panels: dict[str, list[Curve]] = {}
    for setting in settings:
        name = f"rows of {setting.row_bytes} B, {setting.batch_size} seeds"
        same = sorted(
            (s for s in settings if (s.row_bytes, s.batch_size) == (setting.row_bytes, setting.batch_size)),
            key=lambda s: Fraction(s.share),
        )
        speeds = {side: {float(Fraction(s.share)): s.rows_per_s(side) for s in same} for side in LABELS}
        panels[name] = [
            (LABELS[side], [x for x in by_share if by_share[x]], [y / 1000 for y in by_share.values() if y])
            for side, by_share in speeds.items()
        ]
    titles = ("memory / features", "thousand rows per second")
    plot_curves(path, "Epochs by packs and by random reads", panels, titles, log_x=True, log_y=True)


def compare(args: argparse.Namespace, figures: Figures) -> int:
    if unknown := set(args.sides) - LABELS.keys():
        raise SystemExit(f"no side {', '.join(sorted(unknown))} (there are {', '.join(LABELS)})")
    if no_limit := why_no_limit():
        print(f"MEMORY NOT LIMITED: {no_limit}")
    settings: list[Setting] = []
    wrong, failed = 0, False
    for path, table in datasets(args):
        feature_bytes = table.row_count * table.row_bytes
        for batch_size, share in itertools.product(args.batch_sizes, args.memory_shares):
            memory = max(int(feature_bytes * Fraction(share)), SMALL_MEMORY_BYTES if args.small else 0)
            batches = min(args.batches, -(-table.row_count // batch_size))
            setting = Setting(table.row_bytes, share, memory, batch_size, batches)
            settings.append(setting)
            print(
                f"\n{table.row_count:,} rows of {table.row_bytes} B in pages of {table.page_bytes} B "
                f"({format_bytes(feature_bytes)}), memory {share} ({format_bytes(memory)}), {batches} "
                f"minibatches of {batch_size} seeds, fanouts {args.fanouts}, {os.cpu_count()} cores",
                flush=True,
            )
            measure(args, path, table, setting, figures)
            wrong += check(figures, setting)
            failed = failed or ("auto" in args.sides and "auto" in setting.missing)
    figures.table("all settings", [setting.row() for setting in settings])
    judged = [regret for setting in settings if (regret := setting.regret()) is not None]
    good = sum(regret <= NEAR for regret in judged)
    name = "settings in which auto chose the fastest way, or one within 10 %"
    figures.add(name, good, "", note=f"of {len(judged)}")
    if args.plot:
        draw(args.plot, settings)
    return int(bool(wrong) or failed)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "plot", "seed")
    option = script.option
    text = "use this dataset, in place of synthetic graphs"
    option("dataset", text=text, type=Path, metavar="DATASET")
    option("row-bytes", [128, 512, 2048, 4096], small=[512])
    option("memory-shares", ["1/16", "1/8", "1/4", "1/2"], type=words, small=["1/4"])
    option("batch-sizes", [256], "seeds per minibatch")
    option("batches", 250, "minibatches of an epoch", small=16)
    option("peer-batches", 6, "minibatches of torch and DGL", small=2)
    option("fanouts", [5, 10, 10], small=[5, 5])
    option("size-gb", 2.0, "most bytes of the features, in 1e9")
    option("nodes", 4_000_000, "most nodes", small=150_000)
    option("sides", list(LABELS), small=["auto", "torch", "dgl"], type=words)
    script.run(compare)
