"""`gids heat PATH`: compute the heat of each node and store it in the dataset."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gids.cli.arguments import SEEDS, add_allow_dir, add_path, add_quiet, adder, fanouts, natural
from gids.cli.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from gids.store import FeatureStore

_OPTIONS = {
    "reverse-pagerank": {"seeds", "fanouts", "damping"},
    "sampled": {"seeds", "fanouts", "batch_size", "seed"},
}
_FANOUTS = (10, 10, 10)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "heat",
        help="compute which nodes training reads most, for the cache",
        description="Compute which nodes training reads most, and store the result in the dataset. The cache "
        "prefers the hottest pages. The dataset stays readable while this runs.",
    )
    option = adder(parser)
    add_path(parser, "PATH")
    text = "reverse-pagerank: compute how often sampling from the seeds is expected to read each node. "
    text += "sampled: sample an epoch of minibatches and count those that read each node"
    option("--method", list(_OPTIONS), text, "reverse-pagerank")
    option("--seeds", SEEDS, "seed nodes: a split, or all nodes (default: train)")
    text = "the fanouts of your training; as in DGL, the last one applies to the seeds; -1: all neighbors "
    option("--fanouts", fanouts, f"{text}(default: 10,10,10)", metavar="N,N,...")
    text = "count visits of random walks that continue with probability P, between 0 and 1"
    option("--damping", float, text, metavar="P")
    option("--batch-size", int, "seeds per minibatch (default: 1024)", metavar="N")
    option("--seed", natural, "seed of the random draws (default: 0)", metavar="N")
    add_allow_dir(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.heat import write_heat
    from gids.store import FeatureStore
    from gids.store.part import refuse_part

    names = set.union(*_OPTIONS.values())
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in sorted(options.keys() - _OPTIONS[args.method]):
        raise ValueError(f"--{name.replace('_', '-')} does not apply to --method {args.method}: remove it")
    if "damping" in options and "fanouts" in options:
        raise ValueError("--damping and --fanouts exclude each other: remove one")
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    refuse_part(store, "gids heat", "compute the heat of the whole dataset, then partition it")
    heat = _compute(store, args.method, options, args.quiet)
    write_heat(store.path, args.method, heat)
    if not args.quiet:
        for ntype, values in heat.items():
            above, most = int((values > 0).sum()), float(values.max(initial=0))
            print(f"{ntype}: {above} of {len(values)} nodes have heat, at most {most:.6g}")
    return 0


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
