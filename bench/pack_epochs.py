"""What do later epochs by packs cost, with training and a validation in between?

    python bench/pack_epochs.py papers.gids --memory-share 1/4 --batches 250 --hidden 16
    python bench/pack_epochs.py --small

Loads epochs of shuffled minibatches with reads="auto", in one process with a cold page cache, once without
validation and once with --validation minibatches of another loader of the same source before each epoch and
after the last. With --hidden, trains GraphSAGE. Prints, of each epoch: seconds; those of next(), and the
longest of them after the first; and all over max(bytes / rates of the disk, CPU seconds / cores), with the
rates that fio measured, or gids where it is not installed. Rows are compared with the table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import torch
from graphs import make_dataset
from harness import Figures, Script, disk_rates, least_seconds
from sage import Training

import gids
import gids.io
from gids.bench.features import KeptRows
from gids.bench.isolation import cpu_seconds, device_bytes_read
from gids.convert.synthetic import GraphSpec
from gids.store import Table

MOST_OVER_BOUND = 1.15


def timed(minibatches: Any) -> Iterator[tuple[Any, float]]:
    """Each minibatch, with the seconds that next() took."""
    iterator, begun = iter(minibatches), time.perf_counter()
    for minibatch in iterator:
        yield minibatch, time.perf_counter() - begun
        begun = time.perf_counter()


def run_epoch(
    loader: gids.NodeLoader, table: Table, batches: int, training: Training | None
) -> dict[str, Any]:
    """Load an epoch, and train on it. Returns its row of the table, with what it used, for least_seconds."""
    before, read_before, cpu = loader.stats()["packs"], device_bytes_read() or 0, cpu_seconds()
    begun, waits, kept = time.perf_counter(), [], KeptRows(batches, table)
    for minibatch, wait in timed(loader):
        waits.append(wait)
        rows = minibatch.features[table.name]
        if training is not None:  # to predict the sign of each seed's first value
            labels = (rows[: minibatch.blocks[-1].num_dst, 0] > 0).long()
            training.step(minibatch.blocks, rows, labels)
        kept.add(minibatch.input_nodes, rows)
    seconds, packs = time.perf_counter() - begun, loader.stats()["packs"]
    written = packs["bytes_written"] - before["bytes_written"]
    used = {
        "read": (device_bytes_read() or 0) - read_before,
        "written": written,
        "cpu_s": cpu_seconds() - cpu,
    }
    return {
        "seconds": seconds,
        "in next()": sum(waits),
        "first": waits[0],
        "longest after it": max(waits[1:]),
        "by packs": packs["minibatches"] - before["minibatches"],
        "minibatches": len(waits),
        "wrong rows": kept.compare(table.read_rows)[1],  # its reads and CPU time do not count
        "used": used,
    }


def run(args: argparse.Namespace, path: Path, validated: int) -> list[dict[str, Any]]:
    """A row for each epoch. validated: minibatches of a validation."""
    gids.io.drop_page_cache(path)
    with gids.open(path) as whole:
        [ntype] = whole.store.node_types
        table = max(whole.store.tables.values(), key=lambda t: t.page_count * t.page_bytes)
        memory = int(table.row_count * table.row_bytes * Fraction(args.memory_share))
        ids = torch.randperm(whole.store.num_nodes(ntype), generator=torch.Generator().manual_seed(args.seed))
    options: dict[str, Any] = {"tables": [table.name], "batch_size": args.batch_size, "seed": args.seed}
    dims = [*table.shape, *[args.hidden] * (len(args.fanouts) - 1), 2]
    training = Training(dims, seed=args.seed, rate=0.001) if args.hidden else None
    rows = []
    with gids.open(path, memory=memory, reads=args.reads) as source:
        seeds = ids[: args.batches * args.batch_size]
        loader = gids.NodeLoader(source, seeds, args.fanouts, shuffle=True, **options)
        validation = gids.NodeLoader(source, ids[: validated * args.batch_size], args.fanouts, **options)
        for epoch in range(args.epochs + 1):
            for _ in validation if validated else ():
                pass
            if epoch < args.epochs:
                rows.append({"epoch": epoch + 1} | run_epoch(loader, table, args.batches, training))
    disk = disk_rates(Path(table.shard_paths[0]), args.dir)  # not before: loaders would not measure theirs
    return [
        row | {"over bound": row["seconds"] / least_seconds(disk, **used)}
        for row in rows
        if (used := row.pop("used"))
    ]


def measure(args: argparse.Namespace, figures: Figures) -> int:
    epochs = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = args.dataset
        if path is None:
            args.batches, args.fanouts = min(args.batches, 16), [5, 5]
            spec = GraphSpec(node_count=150_000, degree=8.0, dim=64, seed=args.seed)
            path = make_dataset(Path(folder), spec).path
        for validated in dict.fromkeys((0, args.validation)):
            rows = epochs[validated] = run(args, path, validated)
            figures.table(f"{validated} minibatches of validation between epochs", rows)
            later = [row["over bound"] for row in rows[1:] or rows]
            name = f"epochs after the first over the bound, {validated} minibatches of validation"
            figures.add(name, median(later), "x", most=MOST_OVER_BOUND)
    plain, *rest = (sum(row["seconds"] for row in rows) for rows in epochs.values())
    for seconds in rest:
        figures.add("training epochs with validation over those without it", seconds / plain, "x", most=1.05)
    return int(any(row["wrong rows"] for rows in epochs.values() for row in rows))


if __name__ == "__main__":
    script = Script(__doc__, "dir", "seed")
    text = "default: a small synthetic graph, as with --small"
    script.add_argument("dataset", type=Path, nargs="?", help=text)
    option = script.option
    option("memory-share", "1/4", "memory, as a share of the features")
    option("reads", "auto", choices=["auto", "random", "pack"])
    option("epochs", 3)
    option("batches", 250, "minibatches of an epoch")
    option("batch-size", 256)
    option("fanouts", [5, 10, 10])
    option("hidden", 0, "hidden units of GraphSAGE (default: 0, no training)")
    option("validation", 2, "minibatches of a validation")
    script.run(measure)
