"""`gids heat PATH`: compute the heat of each node and store it in the dataset."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench.arguments import add_allow_dir, adder, fanouts
from gids.cli.arguments import add_quiet
from gids.cli.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from gids.store import FeatureStore

_OPTIONS = {
    "reverse-pagerank": {"seeds", "fanouts", "damping"},
    "sampled": {"seeds", "fanouts", "batch_size", "batches", "seed"},
}
_FANOUTS = (10, 10, 10)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "heat",
        help="compute which nodes training reads most, for the cache",
        description="Compute which nodes training reads most, and store the result in the dataset. The cache "
        "prefers the hottest pages. The dataset stays readable while this runs.",
    )
    add = parser.add_argument
    option = adder(parser)
    add("path", metavar="PATH", type=Path, help="a dataset")
    option(
        "--method",
        list(_OPTIONS),
        "reverse-pagerank: compute how often sampling from the seeds is expected to read each node. "
        "sampled: sample minibatches and count those that read each node",
        "reverse-pagerank",
    )
    option("--seeds", ["train", "val", "test", "all"], "seed nodes: a split, or all nodes (default: train)")
    option(
        "--fanouts",
        fanouts,
        "the fanouts of your training; as in DGL, the last one applies to the seeds; -1: all neighbors "
        "(default: 10,10,10)",
        metavar="N,N,...",
    )
    option(
        "--damping",
        float,
        "count visits of random walks that continue with probability P, between 0 and 1",
        metavar="P",
    )
    option("--batch-size", int, "seeds per minibatch (default: 1024)", metavar="N")
    option("--batches", int, "number of minibatches to sample (default: one epoch)", metavar="N")
    option("--seed", int, "seed of the random draws (default: 0)", metavar="N")
    add_allow_dir(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.store.part import refuse_part
    from gids.write.heat_writer import write_heat

    names = set.union(*_OPTIONS.values())
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _check_options(args.method, options)
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    refuse_part(store, "gids heat", "compute the heat of the whole dataset, then partition it")
    heat = _compute(store, args.method, options, args.quiet)
    store.locate.check_unchanged()
    write_heat(store.path, args.method, heat)
    if not args.quiet:
        for ntype, values in heat.items():
            above, most = int((values > 0).sum()), float(values.max(initial=0))
            print(f"{ntype}: {above} of {len(values)} nodes have heat, at most {most:.6g}")
    return 0


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    for name in sorted(options.keys() - _OPTIONS[method]):
        raise ValueError(f"--{name.replace('_', '-')} does not apply to --method {method}: remove it")
    if "damping" in options and "fanouts" in options:
        raise ValueError("--damping and --fanouts exclude each other: remove one")


def _compute(
    store: FeatureStore, method: str, options: dict[str, Any], quiet: bool
) -> Mapping[str, np.ndarray]:
    from gids.heat import choose_seeds, expected_visits, reverse_pagerank, sampled_counts

    unit = "minibatches" if method == "sampled" else "B"
    with Progress(f"heat ({method})", quiet=quiet, unit=unit) as progress:
        seeds = choose_seeds(store, options.pop("seeds", "train"))
        if "damping" in options:
            return reverse_pagerank(store, seeds, **options, on_bytes=progress.add)
        fanouts = options.pop("fanouts", _FANOUTS)
        if method == "sampled":
            return sampled_counts(
                store, seeds, fanouts, **options, on_total=progress.total, on_batch=progress.add
            )
        return expected_visits(store, seeds, fanouts, on_bytes=progress.add)
