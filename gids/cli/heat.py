"""`gids heat PATH --method …`: computes how hot each node is and stores it in the dataset."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.cli.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from gids.store import FeatureStore

_OPTIONS = {
    "out-degree": set[str](),
    "reverse-pagerank": {"seeds", "fanouts", "damping"},
    "sampled": {"seeds", "fanouts", "batch_size", "batches", "seed"},
}
_FANOUTS = (10, 10, 10)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "heat",
        help="compute which nodes will be read most, for the cache",
        description="Compute which nodes training will read most, and store it in the dataset, where "
        "FeatureLoader(heat=...) finds it. The dataset is readable all the while.",
    )
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument(
        "--method",
        required=True,
        choices=list(_OPTIONS),
        help="out-degree: of the graph (conversion stores it already). reverse-pagerank: visits expected "
        "of sampling from the seeds. sampled: minibatches of a trial epoch that read the node",
    )
    parser.add_argument(
        "--seeds",
        choices=["train", "val", "test", "all"],
        help="the nodes that training starts from (default: train)",
    )
    parser.add_argument(
        "--fanouts",
        type=_fanouts,
        metavar="N,N,...",
        help="those that you train with, as DGL's NeighborSampler takes them: the last is that of the "
        "seeds; -1: all neighbours (default: 10,10,10)",
    )
    parser.add_argument(
        "--damping",
        type=float,
        metavar="P",
        help="instead of fanouts: visits of random walks that go on with this probability",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="seeds of a minibatch (default: 1024)")
    parser.add_argument("--batches", type=int, metavar="N", help="minibatches to sample (default: an epoch)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random draws (default: 0)")
    parser.add_argument(
        "--allow-dir", action="append", default=[], metavar="DIR", help="where shards may lie outside PATH"
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from gids.store import FeatureStore
    from gids.write.heat_writer import write_heat

    names = set.union(*_OPTIONS.values())
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    _check_options(args.method, options)
    store = FeatureStore(args.path, allow_dirs=args.allow_dir)
    heat = _compute(store, args.method, options, args.quiet)
    write_heat(store.path, args.method, heat)
    if not args.quiet:
        for ntype, values in heat.items():
            above, most = int((values > 0).sum()), float(values.max(initial=0))
            print(f"{ntype}: {above} of {len(values)} nodes have heat, at most {most:.6g}")
    return 0


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    for name in sorted(options.keys() - _OPTIONS[method]):
        raise ValueError(f"--{name.replace('_', '-')} means nothing to --method {method}; leave it out")
    if "damping" in options and "fanouts" in options:
        raise ValueError("--damping is of endless walks, --fanouts of sampling in layers: leave one out")


def _compute(
    store: FeatureStore, method: str, options: dict[str, Any], quiet: bool
) -> Mapping[str, np.ndarray]:
    from gids.heat import choose_seeds, expected_visits, out_degrees, reverse_pagerank, sampled_counts

    unit = "minibatches" if method == "sampled" else "B"
    with Progress(f"heat ({method})", quiet=quiet, unit=unit) as progress:
        if method == "out-degree":
            return out_degrees(store, on_bytes=progress.add)
        seeds = choose_seeds(store, options.pop("seeds", "train"))
        if "damping" in options:
            return reverse_pagerank(store, seeds, **options, on_bytes=progress.add)
        fanouts = options.pop("fanouts", _FANOUTS)
        if method == "sampled":
            return sampled_counts(
                store, seeds, fanouts, **options, on_total=progress.total, on_batch=progress.add
            )
        return expected_visits(store, seeds, fanouts, on_bytes=progress.add)


def _fanouts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 10,5,5") from None
