"""Are epochs by packs, and by default, faster than with another version of gids, and near the disk's limits?

    python bench/pack_versions.py --before OTHER/bin/python    # 12 GB on disk, about an hour
    python bench/pack_versions.py --datasets BIG --big graph.gids
    python bench/pack_versions.py --small                      # seconds; only shows that it works

Every run is a fresh process with a cold page cache, without training. The processes of the two versions
alternate. --before: a Python that imports the other version; without it, only this version runs. BIG: 4
million rows of 512 B; MID: 2 million; ROWS: 2 million of 4 KiB. Memory is in MB of 1e6 bytes. 64 rows of each
minibatch are compared with the table. The last table has every target: a ratio to the version before, or a
figure of this version. The disk is measured by fio, or by gids where fio is not installed.

Versions differ in whether their stats() count spools. The kernel counts them, and what measuring the disk and
sampling from a cold topology read, and writes that may never reach the disk.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from graphs import make_dataset
from harness import Figures, Script, alternate, disk_rates, least_seconds, run_side

import gids.io
from gids.bench.isolation import FreshProcessError
from gids.cli.arguments import words
from gids.convert.synthetic import GraphSpec
from gids.store import FeatureStore

MB = 10**6
EPOCHS = 3  # by default, on BIG
TIMEOUT_S = 3600.0
TIMES = "\N{MULTIPLICATION SIGN}"

Run = dict[str, Any]  # of packs_side
Runs = dict[tuple[str, int], list[Run]]
"""By (reads, memory in MB): a run of each round, of one version."""


@dataclass(frozen=True)
class Size:
    """A dataset, and an epoch of it. memory_mb: the sizes to measure; the first is that of most targets."""

    nodes: int
    row_bytes: int
    memory_mb: Sequence[int]
    batches: int
    batch_size: int


SIZES = {  # (default, small)
    "BIG": (Size(4_000_000, 512, (512, 256, 160), 250, 256), Size(60_000, 512, (32,), 8, 32)),
    "MID": (Size(2_000_000, 512, (400, 256, 160), 62, 256), Size(60_000, 512, (32,), 8, 32)),
    "ROWS": (Size(2_000_000, 4096, (2048,), 250, 128), Size(7_500, 4096, (32,), 8, 16)),
}


@dataclass(frozen=True)
class Bar:
    """A figure and its targets.

    of: computes the figure from a version's runs; raises KeyError if one of them failed. ratio, least_ratio:
    the most and the least that it may be over that of the version before. most: the most that it may be.
    """

    what: str
    of: Callable[[Runs], float]
    unit: str = "s"
    ratio: float | None = None
    least_ratio: float | None = None
    most: float | None = None

    def value(self, runs: Runs) -> float | None:
        try:
            return self.of(runs)
        except KeyError:
            return None


def figure_of(reads: str, memory: int, figure: Callable[[Run], float]) -> Callable[[Runs], float]:
    """The median of a figure over the rounds."""
    return lambda runs: median(map(figure, runs[reads, memory]))


def later(figure: Callable[[Run], float]) -> Callable[[Run], float]:
    """The median of a figure over the epochs after the first."""
    return lambda run: median(map(figure, run["later"]))


def seconds(epoch: Run) -> float:
    return float(epoch["seconds"])


def first_minibatch(epoch: Run) -> float:
    return float(epoch["first_s"])


def counted_gb(epoch: Run) -> float:
    return float(epoch["packs_read_bytes"] + epoch["written_bytes"]) / 1e9


def moved_gb(epoch: Run) -> float:
    if epoch["read_bytes"] is None:
        raise KeyError("the kernel hides how many bytes a process read")
    return float(epoch["read_bytes"] + epoch["file_bytes"]) / 1e9


def over_bound(disk: Mapping[str, float], epoch: Run) -> float:
    """Written are the packs alone, not spools that the page cache may drop, so that the bound is low."""
    read = epoch["packs_read_bytes"] if epoch["read_bytes"] is None else epoch["read_bytes"]
    least_s = least_seconds(disk, read=read, written=epoch["written_bytes"], cpu_s=epoch["cpu_s"])
    return seconds(epoch) / least_s


def over(above: Callable[[Runs], float], *below: Callable[[Runs], float]) -> Callable[[Runs], float]:
    """A figure over the least of others."""
    return lambda runs: above(runs) / min(figure(runs) for figure in below)


def bars_of_big(size: Size, disk: Mapping[str, float]) -> Iterator[Bar]:
    memory = size.memory_mb[0]
    moved = f"BIG, packs, {memory} MB: read and written"
    yield Bar(f"{moved}, by stats()", figure_of("pack", memory, counted_gb), "GB", ratio=0.85)
    yield Bar(f"{moved}, by the kernel", figure_of("pack", memory, moved_gb), "GB", ratio=0.85)
    for mb, ratio in zip(size.memory_mb, (0.7, 0.6, 0.4), strict=False):
        yield Bar(f"BIG, packs, {mb} MB: epoch", figure_of("pack", mb, seconds), ratio=ratio)
    name, bound = f"BIG, default, {memory} MB", partial(over_bound, disk)
    default = partial(figure_of, "auto", memory)
    yield Bar(f"{name}: first epoch", default(seconds), ratio=0.9)
    yield Bar(f"{name}: later epochs", default(later(seconds)), ratio=0.9)
    yield Bar(f"{name}: first minibatch", default(first_minibatch), ratio=1.0)
    least = "over max(bytes / rates, CPU time / cores)"
    yield Bar(f"{name}: first epoch {least}", default(bound), "x", most=1.4)
    yield Bar(f"{name}: later epochs {least}", default(later(bound)), "x", most=1.15)


def bars_of_mid(size: Size, disk: Mapping[str, float]) -> Iterator[Bar]:
    for mb in size.memory_mb:
        speed_up = over(figure_of("random", mb, seconds), figure_of("auto", mb, seconds))
        yield Bar(f"MID, {mb} MB: default over random reads", speed_up, "x", least_ratio=1.0)


def bars_of_rows(size: Size, disk: Mapping[str, float]) -> Iterator[Bar]:
    for mb in size.memory_mb:
        default, *ways = (figure_of(reads, mb, seconds) for reads in ("auto", "random", "pack"))
        yield Bar(
            f"ROWS, {mb} MB: time by default over the better way's", over(default, *ways), "x", most=1.03
        )


BARS: Mapping[str, Callable[[Size, Mapping[str, float]], Iterator[Bar]]] = {
    "BIG": bars_of_big,
    "MID": bars_of_mid,
    "ROWS": bars_of_rows,
}
READS = {"BIG": ["pack"], "MID": ["random", "auto"], "ROWS": ["random", "pack", "auto"]}
"""What one epoch with each size of memory is measured with."""


def runs_of(name: str, size: Size) -> Iterator[tuple[str, int, int]]:
    """(reads, memory in MB, epochs) of each run on a dataset."""
    yield from ((reads, mb, 1) for mb in size.memory_mb for reads in READS[name])
    if name == "BIG":
        yield "auto", size.memory_mb[0], EPOCHS


@contextmanager
def dataset(args: argparse.Namespace, name: str, size: Size) -> Iterator[Path]:
    """The dataset of an option; else a synthetic one, which only --keep keeps."""
    if (path := getattr(args, name.lower())) is not None:
        yield path
        return
    folder = args.dir / f"gids-versions-{name}"
    try:
        if not (path := folder / "graph.gids").exists():
            folder.mkdir(parents=True, exist_ok=True)
            degree = 8.0 if args.small else 16.0
            spec = GraphSpec(size.nodes, degree=degree, dim=size.row_bytes // 4, seed=args.seed)
            make_dataset(folder, spec)
        yield path
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_version(version: str, python: str, config: Mapping[str, Any]) -> Run | None:
    """An epoch, or more, with a version, cold. None if it failed, for a reason that is printed."""
    gids.io.drop_page_cache(config["dataset"])
    what = f"{version}, {config['side']}, {config['memory_bytes'] // MB} MB"
    try:
        run = run_side("packs_side", config, python=python, timeout_s=TIMEOUT_S)
    except FreshProcessError as error:
        print(f"  {what}: {error.reason}", flush=True)
        return None
    spent = ", ".join(f"{seconds(epoch):.2f} s" for epoch in (run, *run["later"]))
    choices = ", ".join(f"{choice['minibatches']} by {choice['way']}" for choice in run["choices"])
    wrong = f"{run['wrong_rows']} of {run['compared_rows']:,} rows differ"
    print(f"  {what}: {spent}; {'; '.join(filter(None, (choices, wrong)))}; {run['gids']}", flush=True)
    return run


def judge(figures: Figures, bar: Bar, now: float | None, before: float | None) -> dict[str, Any]:
    """Add the figure. Returns its row of the table."""
    over_before = now / before if now is not None and before else None
    limits = {"most": bar.most}
    value, unit, name, note = now, bar.unit, bar.what, ""
    if over_before is not None and bar.most is None:
        limits = {"most": bar.ratio, "bar": bar.least_ratio}
        value, unit, name = over_before, "x", f"{bar.what}, over the version before"
        note = f"{before:.3g} to {now:.3g} {'' if bar.unit == 'x' else bar.unit}".strip()
    passed = None
    if value is not None:
        figures.add(name, value, unit, note=note, **limits)
        passed = figures.figures[-1]["passed"]
    if bar.most is not None:
        wanted = f"≤ {bar.most} {TIMES}"
    else:
        wanted = f"{'≥' if bar.ratio is None else '≤'} {bar.ratio or bar.least_ratio} {TIMES} before"
    return {
        "what": bar.what,
        "before": "-" if before is None else before,
        "now": "FAILED" if now is None else now,
        "unit": bar.unit.replace("x", TIMES),
        "now over before": "-" if over_before is None else over_before,
        "target": wanted,
        "passed": {True: "yes", False: "NO", None: "-"}[passed],
    }


def compare(args: argparse.Namespace, figures: Figures) -> int:
    if unknown := set(args.datasets) - SIZES.keys():
        raise SystemExit(f"no dataset {', '.join(sorted(unknown))} (there are {', '.join(SIZES)})")
    args.dir.mkdir(parents=True, exist_ok=True)
    pythons = {"now": sys.executable} | ({"before": args.before} if args.before else {})
    rows, wrong = [], 0
    for name in args.datasets:
        size, runs = SIZES[name][args.small], {version: Runs() for version in ("now", "before")}
        with dataset(args, name, size) as path:
            with closing(FeatureStore(path)) as store:
                table = max(store.tables.values(), key=lambda t: t.page_count * t.page_bytes)
            disk = disk_rates(Path(table.shard_paths[0]), args.dir)
            rates = ", ".join(f"{kind} {rate / 1e6:,.0f} MB/s" for kind, rate in disk.items())
            print(f"\n{name}: {table.row_count:,} rows of {table.row_bytes} B; the disk: {rates}", flush=True)
            for reads, mb, epochs in runs_of(name, size):
                config = {
                    "side": reads,
                    "dataset": str(path),
                    "table": table.name,
                    "memory_bytes": mb * MB,
                    "fanouts": args.fanouts,
                    "batch_size": size.batch_size,
                    "batches": size.batches,
                    "epochs": epochs,
                    "shuffle": True,
                    "seed": args.seed,
                    "scratch": str(args.dir),
                }
                sides = {v: partial(run_version, v, python, config) for v, python in pythons.items()}
                for version, rounds in alternate(sides, args.rounds).items():
                    if done := [run for run in rounds if run is not None]:
                        runs[version][reads, mb] = done
                        wrong += sum(run["wrong_rows"] for run in done)
        bars = BARS[name](size, disk)
        rows += [judge(figures, bar, *(bar.value(runs[v]) for v in ("now", "before"))) for bar in bars]
    figures.table("Targets", rows)
    return int(wrong > 0 or any(row["now"] == "FAILED" for row in rows))


if __name__ == "__main__":
    script = Script(__doc__, "dir", "keep", "seed")
    option = script.option
    option("before", text="Python that imports the version before", type=str, metavar="PYTHON")
    option("datasets", list(SIZES), type=words)
    text = "use this dataset, in place of a synthetic graph"
    for name in SIZES:
        option(name.lower(), text=text, type=Path, metavar="DATASET")
    option("fanouts", [5, 10, 10], small=[5, 5])
    option("rounds", 1, "runs of each version")
    script.run(compare)
