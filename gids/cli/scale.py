"""`gids scale DATASET`: predict what an epoch reads, sends and takes on 1 to 1024 ranks, in each mode."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gids.bench.arguments import SAMPLERS, open_store, parse_cache_size
from gids.cli.arguments import (
    SEEDS,
    add_allow_dir,
    add_minibatches,
    add_path,
    add_quiet,
    adder,
    natural,
    positive,
    rate,
)
from gids.cli.progress import Progress
from gids.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from gids.scale import Rates
    from gids.store import FeatureStore, Table

EPILOG = """\
Give the rates of one rank. If several ranks share a disk or a network card, give the share of one.
Without --storage-gb-s and --reads-per-s the dataset's disk is measured, in less than a second.
"""
_RATES = {
    "storage_gb_s": ("storage", 1e9, "GB/s that a rank reads from storage (default: measured)"),
    "reads_per_s": ("reads_per_s", 1.0, "random reads per second of a rank (default: measured)"),
    "network_gb_s": ("network", 1e9, "GB/s that a rank sends while it receives as much (default: 12.5)"),
    "latency_us": ("latency_s", 1e-6, "microseconds of a message between ranks (default: 10)"),
    "memory_gb_s": ("memory", 1e9, "GB/s of a rank's memory, reads and writes together (default: 100)"),
    "flops": ("flops", 1.0, "floating-point operations per second that training reaches (default: 2e13)"),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "scale",
        help="predict training on 1 to 1024 ranks",
        description="Sample minibatches of a dataset, and predict seconds and bytes of an epoch on 1, 2,\n"
        "4 … ranks, for independent, partitioned, 1.5D and cooperative training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = adder(parser)
    add_path(parser, "DATASET", "a dataset with topology and features")
    names = f"{', '.join(SAMPLERS)} (default: neighbor)"
    option("--sampler", SAMPLERS, names, "neighbor", "NAME")
    add_minibatches(parser)
    text = "minibatches over which draws stay correlated; matters with --policy lru"
    option("--kappa", positive, text, 1, "N")
    option("--seeds", SEEDS, "seeds", "train")
    option("--ranks", positive, "largest number of ranks", 1024, "N")
    option("--cache", None, "feature cache of a rank: 10%% of the pages, or 4GB", "10%", "SIZE")
    text = "cache policy: keep the pages with the most heat, or those used last"
    option("--policy", ["static", "lru"], text, "static")
    option("--hidden", positive, "width of the hidden layers", 256, "N")
    text = "memory of a rank; larger modes are not recommended (default: no limit)"
    option("--memory", parse_bytes, text, metavar="BYTES")
    for name, (_, _, text) in _RATES.items():
        option(f"--{name.replace('_', '-')}", rate, text, metavar="N")
    text = "time for sampling, about; larger minibatches are extrapolated (default: 20)"
    option("--seconds", rate, text, 20.0, "S")
    option("--seed", natural, "random seed", 0, "N")
    option("--json", Path, "write curves and predictions to FILE", metavar="FILE")
    option("--plot", Path, "draw the predictions to FILE, as PNG", metavar="FILE")
    add_allow_dir(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    from gids.bench.plot import check_plotting
    from gids.bench.report import check_writable, write_text
    from gids.scale.curves import Setting, measure
    from gids.scale.model import Model, Plan, predict_all
    from gids.scale.text import curves_table, plot, prediction_tables, rates_line, recommend

    if args.plot is not None:
        check_plotting()
    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)
    store = open_store(args)
    tables = [t for t in store.tables.values() if isinstance(t.type, str)]
    if not tables:
        raise ValueError(f"{store.name} has no table of nodes")
    _, unit, cache_bytes = parse_cache_size(args.cache, minibatches=False)
    whole = sum(t.page_count * t.page_bytes for t in tables)
    cache_bytes = min(whole, cache_bytes * whole if unit == "%" else cache_bytes)
    rates, where = _rates(args, tables)
    setting = Setting(
        tuple(args.fanouts),
        args.batch_size,
        args.sampler,
        args.kappa,
        args.seeds,
        args.policy,
        args.seed,
        args.seconds,
    )
    ranks = [1 << i for i in range(args.ranks.bit_length())]
    with Progress("scale", quiet=args.quiet, unit=" sizes") as progress:
        curves = measure(store, setting, ranks[-1] * args.batch_size, lambda _: progress.add(1))
    plan, model = Plan(cache_bytes, args.memory), Model(args.hidden, _classes(store))
    predictions = predict_all(curves, rates, plan, model, ranks)
    advice = recommend(predictions)
    if args.json is not None:
        contents = {
            "dataset": str(args.path),
            "setting": vars(setting),
            "epoch_seeds": curves.epoch_seeds,
            "rates": vars(rates),
            "cache_bytes": cache_bytes,
            "curves": [
                {name: value for name, value in asdict(point).items() if name != "users"}
                for point in curves.points
            ],
            "predictions": [asdict(prediction) for prediction in predictions],
            "recommendation": advice,
        }
        text = json.dumps(contents, indent=2, default=lambda array: array.tolist())
        write_text(args.json, text + "\n")
    if args.plot is not None:
        title = f"{store.name}: {args.sampler}, batch {args.batch_size} per rank"
        plot(args.plot, title, predictions)
    if args.quiet:
        return 0
    print(f"{store.name}: {curves.epoch_seeds:,} seeds, batch {args.batch_size} per rank, {args.sampler}")
    print(f"cache of a rank: {format_bytes(int(cache_bytes))}, {args.policy}; {rates_line(rates, where)}")
    print(f"\nminibatches by size; nodes and edges by layer, from the seeds on\n\n{curves_table(curves)}")
    for title, table in prediction_tables(predictions):
        print(f"\n{title}\n\n{table}")
    if any(p.extrapolated for p in predictions):
        print(f"\n~: extrapolated from minibatches of at most {curves.largest:,} seeds")
    print(f"\n{advice}")
    return 0


def _rates(args: argparse.Namespace, tables: Sequence[Table]) -> tuple[Rates, str]:
    """The rates, and what of storage was measured."""
    from gids.scale.model import Rates

    rates_given = {
        field: getattr(args, name) * unit
        for name, (field, unit, _) in _RATES.items()
        if getattr(args, name) is not None
    }
    rates, of_storage = Rates(), {"storage", "reads_per_s"} & rates_given.keys()
    if len(of_storage) < 2:
        rates = rates.with_storage_of(tables)
    where = {0: " (measured)", 1: " (partly measured)", 2: ""}[len(of_storage)]
    return replace(rates, **rates_given), where


def _classes(store: FeatureStore) -> int:
    classes = [v for v in store.labels.values() if v.numel() and not v.is_floating_point()]
    return max((1 + int(labels.max()) for labels in classes), default=64)
