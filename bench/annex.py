"""What does the annex cost, next to packs: bytes, and seconds of planning, sweeping and reading?

    python bench/annex.py                # 2 GB of features, 6 GB of scratch, several minutes
    python bench/annex.py --small        # seconds; only shows that it works
    python bench/annex.py --dataset big.gids --memory 512 --lines 300

Samples minibatches of a synthetic graph. For each size of memory: an epoch of a loader with reads="pack" in
so many MB; and the annex of the same minibatches with lines of so many MB, without a loader: planned, swept,
and read through the cache. Epochs of packs include sampling. The page cache is dropped before each. Every row
of the annex is compared with the table in a second reading, which is not timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from graphs import make_dataset
from harness import Figures, Script

import gids
import gids.io
from gids import _core
from gids.bench.isolation import cpu_seconds
from gids.cache.output_dtype import row_form
from gids.convert.synthetic import GraphSpec
from gids.io import open_engine
from gids.packs import Scratch, rows_of
from gids.packs.annex import PIECE_BYTES, PIECES, Annex, RowUses
from gids.store import FeatureStore, Table

MB = 10**6


@dataclass
class Epoch:
    """The rows of each minibatch, and what sampling them took."""

    rows: list[np.ndarray]
    sample_s: float

    @property
    def most(self) -> int:
        return max(map(len, self.rows))


def seeds_of(source: Any, args: argparse.Namespace) -> torch.Tensor:
    [ntype] = source.store.node_types
    nodes = torch.randperm(source.store.num_nodes(ntype), generator=torch.Generator().manual_seed(args.seed))
    return nodes[: args.batches * args.batch_size]


def sample(path: Path, args: argparse.Namespace) -> Epoch:
    with gids.open(path, memory="500MB", reads="random") as source:
        table, seeds = source.store.table(), seeds_of(source, args)
        begun = time.perf_counter()
        with gids.NodeLoader(
            source, seeds, args.fanouts, tables=[], batch_size=args.batch_size, seed=1
        ) as loader:
            ids = [minibatch.input_nodes for minibatch in loader]
        seconds = time.perf_counter() - begun
        return Epoch([rows_of({table.name: nodes}, [table])[0] for nodes in ids], seconds)


def run_packs(path: Path, args: argparse.Namespace, memory: int) -> dict[str, Any]:
    gids.io.drop_page_cache(path)
    with gids.open(path, memory=memory * MB, reads="pack", scratch=args.dir) as source:
        seeds = seeds_of(source, args)
        cpu, begun = cpu_seconds(), time.perf_counter()
        with gids.NodeLoader(source, seeds, args.fanouts, batch_size=args.batch_size, seed=1) as loader:
            for _ in loader:
                pass
            seconds, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
            packs = loader.stats()["packs"]
    return {"read": packs["bytes_read"], "written": packs["bytes_written"], "epoch": seconds, "cpu": cpu}


def read_all(reader: _core.RunReader, epoch: Epoch, outs: Sequence[np.ndarray], table: Table | None) -> int:
    """Read every minibatch. Returns how many rows differ from the table's; 0 without one."""
    wrong = 0
    for step, rows in enumerate(epoch.rows):
        out = outs[step % len(outs)]
        out = out[: len(rows) * (len(out) // epoch.most)].reshape(len(rows), -1)
        error, *_ = reader.read(out)
        if error:
            raise SystemExit(f"the annex cannot be read: errno {error}")
        if table is not None:
            expected = table.read_stored(rows.astype(np.int64))
            wrong += int(np.count_nonzero((expected != out).any(1)))
    return wrong


def run_annex(path: Path, args: argparse.Namespace, lines_mb: int, epoch: Epoch) -> dict[str, Any]:
    gids.io.drop_page_cache(path)
    workers = _core.Workers.create(args.threads)
    with closing(FeatureStore(path)) as store, tempfile.TemporaryDirectory(dir=args.dir) as folder:
        table = store.table().by_row()
        lines = lines_mb * MB // _core.annex_row_bytes(table.row_bytes)
        scratch = Scratch([Path(folder)], 1 << 50)
        uses = RowUses(table, scratch)
        for rows in epoch.rows:
            uses.append(rows)
        annex = Annex(table, scratch, sum(map(len, epoch.rows)) * table.row_bytes + (1 << 26))
        engine = open_engine(table.shards)
        cpu, begun = cpu_seconds(), time.perf_counter()
        superbatch = annex.plan(uses, workers=workers, lines=lines, buffer_bytes=lines_mb * MB // 2)
        planned, plan_cpu = time.perf_counter(), cpu_seconds()
        swept = annex.finish(annex.sweep(superbatch, engine, workers=workers))
        ready, sweep_cpu = time.perf_counter(), cpu_seconds()
        memory = _core.RunMemory.create(
            lines=lines, row_bytes=table.row_bytes, pieces=args.pieces, piece_bytes=PIECE_BYTES
        )
        pool = _core.BufferPool.create(0)  # aligned to memory pages
        outs = [pool.take(epoch.most * table.row_bytes) for _ in range(2)]
        form = row_form(table, None)
        reader = annex.reader(superbatch, memory, form, workers=workers)
        read_all(reader, epoch, outs, None)
        done, end_cpu = time.perf_counter(), cpu_seconds()
        before = reader.stats()
        reader = annex.reader(superbatch, memory, form, workers=workers)
        wrong = read_all(reader, epoch, outs, table)
        plan = superbatch.plan
        found = {
            "read": swept["bytes_read"] + before["bytes_read"],
            "written": swept["bytes_written"],
            "passes": planned - begun,
            "sweep": ready - planned,
            "read and gather": done - ready,
            "of it waiting": before["wait_s"],
            "cpu": end_cpu - cpu,
            "cpu of passes, sweep, reading": str(
                [round(s, 1) for s in (plan_cpu - cpu, sweep_cpu - plan_cpu, end_cpu - sweep_cpu)]
            ),
            "used once": 1 - plan.kept / max(plan.copies, 1),
            "wrong rows": wrong,
        }
        del reader
        engine.close()
        annex.close()
        uses.close()
    return found


def measure(args: argparse.Namespace, figures: Figures) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path = args.dataset
        if path is None:
            spec = GraphSpec(node_count=args.nodes, degree=args.degree, dim=args.dim, seed=args.seed)
            path = make_dataset(Path(folder), spec).path
        epoch = sample(path, args)
        figures.add("sampling", epoch.sample_s, "s")
        rows = []
        for memory, lines in zip(args.memory, args.lines, strict=True):
            packs, annex = run_packs(path, args, memory), run_annex(path, args, lines, epoch)
            wrong += annex["wrong rows"]
            seconds = annex["passes"] + annex["sweep"] + annex["read and gather"]
            rows.append(
                {
                    "memory": f"{memory} MB",
                    "lines": f"{lines} MB",
                    **{f"packs: {k}, GB": round(packs[k] / 1e9, 3) for k in ("read", "written")},
                    **{f"annex: {k}, GB": round(annex[k] / 1e9, 3) for k in ("read", "written")},
                    "packs: epoch, s": round(packs["epoch"], 2),
                    **{
                        f"annex: {k}, s": round(annex[k], 2)
                        for k in ("passes", "sweep", "read and gather", "of it waiting", "cpu")
                    },
                    "cpu of passes, sweep, reading": annex["cpu of passes, sweep, reading"],
                    "copies used once": f"{annex['used once']:.0%}",
                    "wrong rows": annex["wrong rows"],
                }
            )
            total = [side["read"] + side["written"] for side in (annex, packs)]
            name = f"{memory} MB: annex over packs"
            figures.add(f"{name}, bytes read and written", total[0] / max(total[1], 1), "x", most=0.85)
            figures.add(
                f"{name}, seconds with sampling", (seconds + epoch.sample_s) / packs["epoch"], "x", most=0.7
            )
        figures.table("The annex and packs", rows)
    return int(wrong > 0)


if __name__ == "__main__":
    script = Script(__doc__, "dir", "seed")
    script.option("dataset", text="a dataset with one table and a train split (default: a graph)", type=Path)
    script.option("nodes", 4_000_000, small=60_000)
    script.option("degree", 16.0, small=8.0)
    script.option("dim", 128, small=64)
    script.option("batches", 250, small=12)
    script.option("batch-size", 256, small=128)
    script.option("fanouts", [5, 10, 10], small=[5, 5])
    script.option("memory", [512, 256, 160], "MB for the loader with packs", small=[24])
    script.option("lines", [300, 150, 60], "MB of lines for the annex, as many numbers", small=[4])
    script.option("pieces", PIECES, "pieces of 2 MiB that are read before they are due")
    script.option("threads", 2, "threads that plan, copy and gather")
    torch.set_num_threads(1)
    script.run(measure)
