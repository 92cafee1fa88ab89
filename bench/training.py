"""How many reads do fewer bits, dependent minibatches or a locality bias save, at what cost in accuracy?

    python bench/training.py samplers   # 300,000 nodes with a page of 512 B each; half an hour
    python bench/training.py dtypes     # 40,000 nodes, every storage type
    python bench/training.py samplers --small

The graph is made by `gids generate`: a single row is not enough to predict the class, a neighborhood is.
GraphSAGE with two layers is trained several times with other seeds, by a gids.NodeLoader with a cache of a
twentieth of the features. Some rows are compared with the source.

samplers: Neighbor and Labor with dependent minibatches, Neighbor with a locality bias. Reads are those of the
last epoch; accuracy is measured on test nodes with the same sampling for all. Baseline: Neighbor.

dtypes: every storage type has the same minibatches, model and initial weights, and pages of 4096 B. Reads
are those of the first epoch; accuracy is measured on the validation nodes. Baseline: float32.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from graphs import convert, make_dataset
from harness import Figures, Script
from sage import Training

import gids
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.heat import hottest_nodes
from gids.sampler import Labor, LocalityBias, Neighbor, Sampler
from gids.store import FeatureStore

FANOUTS = [10, 10]
STORAGE_TYPES = {
    "float32": [],
    "float16": ["--dtype", "float16"],
    "bfloat16": ["--dtype", "bfloat16"],
    "int8 per row": ["--dtype", "int8"],
    "int8 per column": ["--dtype", "int8", "--scale", "column"],
}


@dataclass(frozen=True)
class Run:
    """accuracy: on the test nodes. epochs: the pages, misses and bytes_read of each, as in stats()."""

    accuracy: float
    epochs: list[dict[str, int]]


def train(
    store: FeatureStore,
    sampler: Sampler,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    cache_bytes: int,
    policy: str = "lookahead",
    hidden: int = 32,
    rate: float = 0.01,
    test_split: str = "test",
    test_fanouts: Sequence[int] = FANOUTS,
) -> Run:
    """Train a new model with minibatches of this sampler, and test it with Neighbor."""
    (table,), (splits,), (labels,) = store.tables, store.splits.values(), store.labels.values()
    training = Training([store.table(table).shape[0], hidden, int(labels.max()) + 1], seed=seed, rate=rate)
    options: dict[str, Any] = {"seed": seed, "dtype": torch.float32}
    source = gids.open(store, memory=2 << 30, tuning=gids.Tuning(cache=cache_bytes, policy=policy))
    changes = []
    with gids.NodeLoader(
        source, splits["train"], sampler, batch_size=batch_size, shuffle=True, **options
    ) as loader:
        for _ in range(epochs):
            before = loader.stats()
            for minibatch in loader:
                training.step(minibatch.blocks, minibatch.features[table], minibatch.labels)
            after = loader.stats()
            names = ("pages", "misses", "bytes_read")
            changes.append({name: after.get(name, 0) - before.get(name, 0) for name in names})
        few = minibatch.input_nodes[:64]
        expected = store.table(table).read_rows(few).to(torch.float32)
        assert torch.equal(minibatch.features[table][:64], expected), "a row differs from the source"
    right = []
    sampling = {"batch_size": 256, **options}
    with (
        torch.no_grad(),
        gids.NodeLoader(source, splits[test_split], Neighbor(test_fanouts), **sampling) as test,
    ):
        for minibatch in test:
            logits = training.model(minibatch.blocks, minibatch.features[table])
            right.append(logits.argmax(1) == minibatch.labels)
    return Run(float(torch.cat(right).float().mean()), changes)


def make_samplers(store: FeatureStore, cache_bytes: int) -> dict[str, Callable[[], Sampler]]:
    """By name in the result."""
    (table,) = store.tables
    held = hottest_nodes(store, table, cache_bytes)
    makers: dict[str, Callable[[], Sampler]] = {}
    for kind in (Neighbor, Labor):
        make = partial(kind, FANOUTS)
        makers[kind.__name__] = make
        for kappa in (16, 256):
            for nested in (False, True):
                name = f"{kind.__name__}, κ = {kappa}{', nested' if nested else ''}"
                makers[name] = partial(make, batch_dependency=kappa, nested=nested)
    for factor in (2, 4, 16):
        for weights in (False, True):
            bias = LocalityBias(held, factor, weights=weights)
            name = f"Neighbor, locality {factor}{', with weights' if weights else ''}"
            makers[name] = partial(Neighbor, FANOUTS, locality=bias)
    return makers


def add_runs(figures: Figures, name: str, runs: list[Run], note: str = "") -> None:
    accuracies = [100 * run.accuracy for run in runs]
    spread = f"± {stdev(accuracies):.2f}" if len(runs) > 1 else ""
    figures.add(f"{name}, accuracy", mean(accuracies), "%", note=", ".join(filter(None, (spread, note))))


def set_threads(args: argparse.Namespace) -> None:
    if args.small:
        torch.set_num_threads(1)  # layers this small take longer by several


def samplers(args: argparse.Namespace, figures: Figures) -> None:
    spec = GraphSpec(
        args.nodes,
        dim=args.dim,
        classes=16,
        train_count=args.seeds,
        val_count=0,
        test_count=args.seeds // 2,
    )
    set_threads(args)
    first = 0.0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        store = make_dataset(Path(folder), spec, page_bytes=512)
        cache_bytes = int(spec.feature_bytes * args.cache)
        options = {"epochs": args.epochs, "batch_size": args.batch_size, "policy": args.policy}
        for name, make in make_samplers(store, cache_bytes).items():
            runs = [
                train(store, make(), seed=seed, cache_bytes=cache_bytes, **options)
                for seed in range(args.runs)
            ]
            add_runs(figures, name, runs)
            missed, pages = (mean(run.epochs[-1][key] for run in runs) for key in ("misses", "pages"))
            first = first or missed
            note = f"{missed / first:.3f} of the first sampler's, {1 - missed / pages:.1%} hits"
            figures.add(f"{name}, pages read in the last epoch", missed, "", note=note)


def dtypes(args: argparse.Namespace, figures: Figures) -> None:
    train_count = args.seeds or args.nodes // 5
    spec = GraphSpec(args.nodes, classes=8, dim=args.dim, train_count=train_count, val_count=args.nodes // 10)
    # a part of the features as float32, whatever they are stored as
    options = {"cache_bytes": int(spec.feature_bytes * args.cache), "hidden": 64, "rate": 0.003}
    options |= {"epochs": args.epochs, "batch_size": args.batch_size, "policy": args.policy}
    options |= {"test_split": "val", "test_fanouts": [10, 5]}
    wide: list[Run] = []
    set_threads(args)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        source = write_graph(Path(folder) / "graph", spec)
        for kind, storage in STORAGE_TYPES.items():
            path = convert(source, *storage, "--page-bytes", "4096")
            if gids_command(["verify", str(path), "--against", str(source), "--quiet"]) != 0:
                raise SystemExit("the dataset differs from its source")
            store = FeatureStore(path)
            runs = [train(store, Neighbor([10, 5]), seed=seed, **options) for seed in range(args.runs)]
            wide = wide or runs
            apart = mean(a.accuracy - b.accuracy for a, b in zip(runs, wide, strict=True))
            add_runs(figures, kind, runs, f"{100 * apart:+.2f} points from float32")
            (table,) = store.tables.values()
            read = runs[0].epochs[0]["bytes_read"] / 1e6
            figures.add(f"{kind}, read in the first epoch", read, "MB", note=f"rows of {table.row_bytes} B")
            shutil.rmtree(path)


if __name__ == "__main__":
    script = Script(__doc__, "dir", questions={"samplers": samplers, "dtypes": dtypes})
    option = script.option
    option("nodes", text="default: 300000; dtypes: 40000", type=int, small=2000)
    option("dim", text="default: 128; dtypes: 256", type=int)
    option("seeds", text="default: 10000; dtypes: a fifth of the nodes", type=int)
    option("epochs", 2, small=1)
    option("batch-size", text="default: 32; dtypes: 256", type=int)
    text = "trainings with other random numbers (default: 2; dtypes: 3)"
    option("runs", text=text, type=int)
    option("policy", "lookahead")
    option("cache", 0.05, "share of the features")
    values = {"nodes": 300_000, "dim": 128, "seeds": 10_000, "batch_size": 32, "runs": 2}
    script.defaults("samplers", {"seeds": 64, "runs": 1}, **values)
    script.defaults("dtypes", {"dim": 32, "runs": 2}, nodes=40_000, dim=256, batch_size=256, runs=3)
    script.run()
