"""What do later epochs by packs cost, with training and a validation in between?

    python bench/pack_epochs.py papers.gids --memory-share 1/4 --batches 250 --hidden 16
    python bench/pack_epochs.py --small

Loads epochs of shuffled minibatches with reads="auto", in one process with a cold page cache, once without
validation and once with --validation minibatches of another loader of the same source before each epoch and
after the last. With --hidden, trains GraphSAGE. Prints, of each epoch: seconds; those of next(), and the
longest of them after the first; and all over max(bytes / rates of the disk, CPU seconds / cores), with the
rates that gids measured. Rows are compared with the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from harness import integers, make_parser, write_json
from sage import GraphSage

import gids
import gids.io
from gids.cli import main as gids_command
from gids.convert.synthetic import GraphSpec, write_graph
from gids.measure.counters import cpu_seconds, device_bytes_read
from gids.measure.kept_rows import KeptRows
from gids.store import Table

Train = Callable[[Any], None]


def trainer(hidden: int, table: Table, layers: int) -> Train:
    """Train GraphSAGE to predict the sign of each seed's first value."""
    if not hidden:
        return lambda minibatch: None
    model = GraphSage([*table.shape, *[hidden] * (layers - 1), 2])
    optimizer = torch.optim.Adam(model.parameters())

    def train(minibatch: Any) -> None:
        rows = minibatch.features[table.name]
        optimizer.zero_grad()
        said = model(minibatch.blocks, rows)
        torch.nn.functional.cross_entropy(said, (rows[: len(said), 0] > 0).long()).backward()
        optimizer.step()

    return train


def timed(minibatches: Any) -> Iterator[tuple[Any, float]]:
    """Each minibatch, with the seconds that next() took."""
    iterator, begun = iter(minibatches), time.perf_counter()
    for minibatch in iterator:
        yield minibatch, time.perf_counter() - begun
        begun = time.perf_counter()


def run(args: Any, path: Path, validated: int) -> list[dict[str, Any]]:
    """Each epoch's figures. validated: minibatches of a validation."""
    gids.io.drop_page_cache(path)
    found: list[dict[str, Any]] = []
    with gids.open(path) as whole:
        [ntype] = whole.store.node_types
        table = max(whole.store.tables.values(), key=lambda t: t.page_count * t.page_bytes)
        memory = int(table.row_count * table.row_bytes * Fraction(args.memory_share))
        ids = torch.randperm(whole.store.num_nodes(ntype), generator=torch.Generator().manual_seed(args.seed))
    options: dict[str, Any] = {"tables": [table.name], "batch_size": args.batch_size, "seed": args.seed}
    train = trainer(args.hidden, table, len(args.fanouts))
    with gids.open(path, memory=memory, reads=args.reads) as source:
        seeds = ids[: args.batches * args.batch_size]
        loader = gids.NodeLoader(source, seeds, args.fanouts, shuffle=True, **options)
        validation = gids.NodeLoader(source, ids[: validated * args.batch_size], args.fanouts, **options)
        for epoch in range(args.epochs + 1):
            for _ in validation if validated else ():
                pass
            if epoch == args.epochs:
                break
            before, read_before, cpu = loader.stats()["packs"], device_bytes_read() or 0, cpu_seconds()
            begun, waits, kept = time.perf_counter(), [], KeptRows(args.batches, table)
            for minibatch, wait in timed(loader):
                waits.append(wait)
                train(minibatch)
                kept.add(minibatch.input_nodes, minibatch.features[table.name])
            seconds, packs = time.perf_counter() - begun, loader.stats()["packs"]
            written = packs["bytes_written"] - before["bytes_written"]
            rates = loader.feature_loader._packs.rates()  # type: ignore[union-attr]
            disk_s = ((device_bytes_read() or 0) - read_before) / rates.read_bytes_per_s
            disk_s += written / max(1.0, rates.write_bytes_per_s)
            bound = max(disk_s, (cpu_seconds() - cpu) / (os.cpu_count() or 1))
            _, wrong = kept.compare(table.read_rows)  # its reads and CPU time do not count
            found.append(
                {
                    "seconds": seconds,
                    "waited": sum(waits),
                    "first": waits[0],
                    "longest": max(waits[1:]),
                    "over_bound": seconds / bound,
                    "by_packs": packs["minibatches"] - before["minibatches"],
                    "wrong": wrong,
                }
            )
            print(
                f"  epoch {epoch + 1}: {seconds:6.2f} s, of which {sum(waits):6.2f} s in next() (first "
                f"{waits[0]:.2f}, longest after it {max(waits[1:]):.2f}), {seconds / bound:.2f} x the bound, "
                f"{found[-1]['by_packs']} of {len(waits)} minibatches by packs, {wrong} wrong rows",
                flush=True,
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "dir", "json", "seed")
    add = parser.add_argument
    add("dataset", type=Path, nargs="?", help="default: a small synthetic graph, as with --small")
    add("--memory-share", default="1/4", help="memory, as a share of the features (default: 1/4)")
    add("--reads", default="auto", choices=["auto", "random", "pack"])
    add("--epochs", type=int, default=3)
    add("--batches", type=int, default=250, help="minibatches of an epoch (default: 250)")
    add("--batch-size", type=int, default=256)
    add("--fanouts", type=integers, default=[5, 10, 10])
    add("--hidden", type=int, default=0, help="hidden units of GraphSAGE (default: 0, no training)")
    add("--validation", type=int, default=2, help="minibatches of a validation (default: 2)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = args.dataset
        if path is None:
            args.batches, args.fanouts = min(args.batches, 16), [5, 5]
            write_graph(
                Path(folder, "graph"), GraphSpec(node_count=150_000, degree=8.0, dim=64, seed=args.seed)
            )
            path = Path(folder, "rows.gids")
            if gids_command(["convert", str(Path(folder, "graph")), str(path), "--quiet"]) != 0:
                return 1
        result = {}
        for validated in (0, args.validation):
            print(
                f"{args.epochs} epochs of {args.batches} minibatches, {validated} of validation between them"
            )
            result[f"validation {validated}"] = run(args, path, validated)
    plain, validated = (sum(e["seconds"] for e in epochs) for epochs in result.values())
    print(f"training epochs with validation take {validated / plain:.2f} x those without it")
    write_json(args.json, result)
    return int(any(epoch["wrong"] for epochs in result.values() for epoch in epochs))


if __name__ == "__main__":
    sys.exit(main())
