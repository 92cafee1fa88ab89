"""How many minibatches are read at a time, and what is it worth, by the rule of GIDS' accumulator?

    python bench/accumulator.py
    python bench/accumulator.py --small

The dynamic storage access accumulator of Park et al., "GIDS", PVLDB 17(6), 2024, holds accesses back until so
many are pending that the SSDs reach a share of their peak. gids plans so many minibatches. Beside the rule:
one planned minibatch, and as many as cover the engine's queue twice with missing pages, as gids did before.

A synthetic graph with rows that fill a page; minibatches of several sizes, because only small ones need more
than two. Rows per second are those of planning, waiting and copying. In flight is the mean number of requests
while there was one. The page cache is dropped before each run, the consumer does nothing else, and every row
of the last minibatch is compared with the dataset.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from graphs import make_dataset
from harness import Figures, Script, alternate

import gids
from gids.convert.synthetic import GraphSpec
from gids.io import drop_page_cache, queue_depth
from gids.io.speed import known_speeds
from gids.loader.options import MAX_PLANNED
from gids.sampler import Neighbor
from gids.store import FeatureStore

AGGREGATION = ("plan", "wait", "gather")
RULE, BEFORE = "by the rule", "twice the queue"


@dataclass(frozen=True)
class Run:
    """planned: at the end. misses: pages of a minibatch. hits: percent of the pages."""

    planned: int
    misses: float
    hits: float
    in_flight: float
    rows_per_s: float


def run(store: FeatureStore, seeds: int, planned: int | None, args: argparse.Namespace) -> Run:
    """Read minibatches of so many seeds. planned: None by the rule."""
    for table in store.tables.values():
        for path in table.shard_paths:
            drop_page_cache(path)
    tuning = gids.Tuning(planned=planned)
    known_speeds.clear()  # each run measures the disk
    with gids.open(store, memory=args.memory, reads="random", tuning=tuning) as source:
        sampler = Neighbor(args.fanouts, threads=1)
        loader = gids.NodeLoader(
            source, store.split("train"), sampler, batch_size=seeds, shuffle=True, labels=False, seed=0
        )

        def mark() -> tuple[float, ...]:
            stats = loader.stats()
            io = stats["engine"]
            waited_s = io["requests"] * io["latency_s"]
            spent_s = sum(stats["seconds"][name] for name in AGGREGATION)
            return stats["hits"], stats["pages"], waited_s, io["busy_s"], spent_s

        rows = 0
        for step, minibatch in enumerate(islice(loader, args.batches)):
            if step == args.batches // 3:
                begun, rows = mark(), 0
            rows += sum(len(values) for values in minibatch.features.values())
        hits, pages, waited_s, busy_s, spent_s = np.subtract(mark(), begun)
        for name, values in minibatch.features.items():
            expected = store.table(name).read_rows(minibatch.input_nodes)
            assert torch.equal(values, expected), "rows differ"
        counted = args.batches - args.batches // 3
        in_flight = waited_s / busy_s if busy_s else 0.0
        return Run(
            loader.stats()["planned"],
            (pages - hits) / counted,
            100 * hits / max(1, pages),
            in_flight,
            rows / spent_s,
        )


def compare(args: argparse.Namespace, figures: Figures) -> None:
    spec = GraphSpec(args.nodes, degree=15, dim=args.dim, train_count=args.nodes // 4)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        store = make_dataset(Path(folder), spec, page_bytes=4 * args.dim)
        (table,) = store.tables.values()
        for seeds in args.seeds:
            trial = run(store, seeds, None, args)
            (speed,) = known_speeds.values()
            before = math.ceil(2 * queue_depth(table.shard_paths) / max(1.0, trial.misses))
            sides = {
                "1": partial(run, store, seeds, 1, args),
                BEFORE: partial(run, store, seeds, min(max(2, before), MAX_PLANNED), args),
                RULE: partial(run, store, seeds, None, args),
            }
            runs = alternate(sides, args.rounds)
            for side, of_side in runs.items():
                rows.append(
                    {
                        "seeds": seeds,
                        "planned": side,
                        "minibatches": median(one.planned for one in of_side),
                        "misses": of_side[0].misses,
                        "hits %": of_side[0].hits,
                        "in flight": median(one.in_flight for one in of_side),
                        "rows/s": median(one.rows_per_s for one in of_side),
                    }
                )
            named = f"{seeds} seeds" if seeds > 1 else "1 seed"
            figures.add(f"{named}: reads that must be pending", speed.pending(), "reads")
            rates = {side: [one.rows_per_s for one in of_side] for side, of_side in runs.items()}
            figures.ratio(f"{named}, the rule over 1 planned: rows/s", rates[RULE], rates["1"])
            figures.ratio(f"{named}, the rule over {BEFORE}: rows/s", rates[RULE], rates[BEFORE])
    figures.table("minibatches that are planned at a time", rows)


if __name__ == "__main__":
    script = Script(__doc__, "dir")
    option = script.option
    option("nodes", 400_000, small=2000)
    option("dim", 1024, "float32 per row, which fills a page", small=128)
    option("fanouts", [5, 5], small=[2, 2])
    option("seeds", [1, 4, 16, 64], "of a minibatch", small=[1, 8])
    option("batches", 240, "minibatches of a run; a third of them is not counted", small=60)
    option("memory", "400MB", "of the loader", small="20MB")
    option("rounds", 5, "alternating runs of each side", small=1)
    script.run(compare)
