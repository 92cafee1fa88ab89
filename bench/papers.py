"""Run what docs/papers.md shows. papers.toml has the rows of that page.

    python bench/papers.py                 # everything, then bench/report.py; 90 minutes on an idle machine
    python bench/papers.py cold windows    # some of it
    python bench/papers.py --list          # print the commands

Results are in bench/results/papers-NAME.json, curves in docs/papers-NAME.png.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = {
    "sizes": "paper_sizes.py",
    "epoch-stages": "epoch.py --size-gb 2.4 --fanouts 5,5,10 --batch-size 64 --batches 40",
    "sampling-sizes": "sampling.py --log2-nodes 17,20,23 --fanouts 10,5,5 --samplers neighbor --threads 2 "
    "--rounds 3",
    "accesses": "accesses.py",
    "buffer": "loading.py buffer",
    "windows": "loading.py windows",
    "cold": "loading.py cold",
    "cold-ladies": "loading.py cold --sampler ladies --fanouts 80,80,80",
    "memory": "loading.py memory",
    "disks": "loading.py disks",
    "accumulator": "accumulator.py",
    "hetero": "epoch.py --hetero --size-gb 2.4 --fanouts 5,5,10 --batch-size 64 --batches 40",
    "labor": "labor.py",
    "bulk": "labor.py --graphs sparse --bulk 16",
    "matrices": "matrix_sampling.py --rounds 5",
    "sampling": "sampling.py --rounds 3 --batches 10 --threads 1 --samplers neighbor labor labor-1 "
    "labor-star ladies ladies-poisson walk",
    "work": "dependent.py work --log2-nodes 19 --doublings 10",
    "misses": "dependent.py misses --log2-nodes 18",
    "learning": "dependent.py learning --steps 400",
    "locality": "dependent.py locality --steps 200",
    "ranks": "ranks.py",
    "placed": "placement.py --log2-nodes 18",
    "placing": "placement.py --log2-nodes 18 --times",
    "links": "placement.py --log2-nodes 18 --links",
}


@dataclass(frozen=True)
class Row:
    """A row of docs/papers.md, as papers.toml says."""

    item: str
    differs: str
    run: str
    paper: str = ""
    figures: Sequence[tuple[str, str]] = ()


WORKS = {
    work: [Row(**row) for row in rows]
    for work, rows in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
"""By the section of docs/papers.md."""


@dataclass(frozen=True)
class Shown:
    """The part of a result's table that docs/papers.md shows: only rows with these values."""

    run: str
    title: str  # how it begins
    columns: Sequence[str]
    only: Mapping[str, Sequence[object]] = field(default_factory=dict)


LAYERS = ("sampler", "nodes 3", "edges 3", "minibatches/s", "accuracy")
OF_LABOR = {"sampler": ("Neighbor", "LABOR-0", "LABOR-1", "LABOR-*", "LADIES", "PLADIES")}
TABLES = {
    "windows": Shown(
        "windows",
        "time and hits",
        ("policy", "window", "hits %", "ms"),
        only={"cache": ("5 minibatches",)},
    ),
    "accumulator": Shown(
        "accumulator",
        "minibatches that are planned",
        ("seeds", "planned", "minibatches", "in flight", "rows/s"),
        only={"seeds": (1, 64)},
    ),
    "accesses": Shown("accesses", "reads per second", ("reads at once", "reads/s", "model")),
    "layers of dense": Shown("labor", "dense: ", LAYERS, only=OF_LABOR),
    "layers of sparse": Shown("labor", "sparse: ", LAYERS, only=OF_LABOR),
    "stages of matrices": Shown(
        "matrices",
        "milliseconds of a minibatch",
        (
            *("sampler", "in bulk", "probability ms", "sampling ms", "extraction ms"),
            *("matrices ms", "gids ms"),
        ),
        only={"in bulk": (1, 64)},
    ),
    "stages": Shown(
        "ranks",
        "milliseconds and counts",
        ("way", "ranks", "copies", "sample ms", "exchange ms", "read ms", "ms", "pages read"),
        only={
            "way": ("independent", "cooperative", "shared", "parts"),
            "bulk": (4,),
            "sampler": ("neighbor",),
            "kappa": ("1", 1),
        },
    ),
    "cooperative stages": Shown(
        "ranks",
        "milliseconds and counts",
        ("way", "ranks", "sample ms", "exchange ms", "read ms", "train ms", "ms"),
        only={
            "way": ("independent", "cooperative", "cooperative, parts", "cooperative, METIS"),
            "ranks": (2, 4),
            "sampler": ("labor",),
            "kappa": ("1", 1),
        },
    ),
}


PLOTS = {
    "bars of stages": ("epoch-stages", "Milliseconds of sampling, aggregation and training"),
    "curves from cold": ("cold", "Milliseconds of aggregation of the first minibatches"),
    "curves of samplers": ("labor", "Loss and accuracy by the number of nodes and edges that were sampled"),
    "curves of work": ("work", "Input nodes per seed by the number of seeds"),
    "curves of misses": ("misses", "Misses of LRU caches by kappa, for 1 to 8 ranks"),
    "curves of learning": ("learning", "Loss and accuracy by minibatch, for several kappas"),
    "curves of locality": ("locality", "Loss and accuracy by minibatch, for several factors of the bias"),
}
"""Pictures of the page: the run, and what they show."""


def result_of(run: str) -> str:
    """The name of the result of a run, or of another result."""
    return f"papers-{run}" if run in RUNS else run


def command_of(run: str) -> str:
    return f"bench/{RUNS[run]}" + (
        f" --plot docs/papers-{run}.png" if run in {name for name, _ in PLOTS.values()} else ""
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="NAME", help=f"{', '.join(RUNS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.runs if name not in RUNS]:
        parser.error(f"no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    failed = []
    for name in args.runs or RUNS:
        command = [sys.executable, *command_of(name).split(), "--json", f"bench/results/papers-{name}.json"]
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        if not args.list and subprocess.run(command, cwd=ROOT).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif not args.list:
        subprocess.run([sys.executable, "bench/report.py"], cwd=ROOT, check=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
