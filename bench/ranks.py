"""How long does each stage of a minibatch take on 1, 2 and 4 processes, by the way in which they share work?

    python bench/ranks.py           # a graph of 200,000 nodes; some minutes
    python bench/ranks.py --small   # one process; seconds

Tables 2 to 4 and 6 of "Cooperative Minibatching in Graph Neural Networks" (Balin et al., TMLR 2025), Figures
4 to 7 of "Distributed Matrix-Based Sampling for Graph Neural Network Training" (Tripathy et al., 2024).
Processes of one machine with gloo: more of them than cores slow each other down, so compare ways on as many
processes.

independent: gids.open. shared: gids.distributed.open of the whole dataset, each page is read by one rank;
range, heat: the same with these owners in place of "hash".
parts: of a partitioned dataset, owners by hash; owners sample. cooperative: one minibatch of all ranks, of
the whole dataset; "cooperative, parts": of a partitioned one; "cooperative, METIS": of one with the parts of
METIS (if pymetis or DGL is installed), as `gids partition --owners` takes them.
c: ranks that have the same part (replicas=c). bulk: minibatches that parts sample in one go. ladies: with
replacement, and ladies-distinct without; a whole epoch of each.

Each process trains GraphSAGE with one thread, cold, with a cache of a tenth of the rows. All ways are run one
after the other, and this is repeated; of a rank, each number is the median. (LADIES runs once.) Stages in
milliseconds of a minibatch, the mean over ranks: exchange is the time in exchanges, waiting for slower ranks
included, and of gradients; sample is the rest of next(). Some rows are compared with the dataset. Counts are
of a rank and minibatch.

The second table has what scale.py predicts beside what is measured, for samplers whose curves it has. It
predicts from counts of this graph and from rates that are measured: of the disk and the cores, which ranks
divide, and of exchanges between as many ranks. Its caches hold the pages with the most heat, where the
measured ones start empty; its stages overlap, and calls of Python, torch and gloo take no time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from curves import Curves, Setting, measure
from graphs import make_dataset
from harness import Figures, Script
from placement import metis
from sage import GraphSage
from scale import Model, Plan, Rates, predict

import gids.distributed
from gids.bench.sampling import make_sampler
from gids.convert.synthetic import GraphSpec
from gids.io import drop_page_cache
from gids.loader.ranks import Group
from gids.sampler import Ladies, Sampler
from gids.store import FeatureStore, graphs_of
from gids.write.partition import partition

STAGES = ("sample", "exchange", "read", "copy", "train")
LADIES = ("ladies", "ladies-distinct")
ON_PARTS = {"parts": "parts", "cooperative, parts": "parts", "cooperative, METIS": "metis"}
"""Ways with a partitioned dataset, and who partitioned it."""
CLASSES, CACHE_SHARE = 16, 10  # the cache holds a tenth of the rows
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    way: str
    ranks: int
    copies: int = 1
    bulk: int = 4
    sampler: str = "neighbor"
    kappa: float = 1


class Exchanges:
    """Seconds in the exchanges of all groups of this process. make() of an exchange does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("exchange", "most", "meet", "wait_for", "start_rows"):
                stack.enter_context(patch.object(Group, name, self._timed(getattr(Group, name))))
            yield

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(group: Group, first: Any, *arguments: Any, **options: Any) -> Any:
            made = 0.0

            def make() -> Any:
                nonlocal made
                begun = time.perf_counter()
                try:
                    return first()
                finally:
                    made = time.perf_counter() - begun

            self._depth += 1
            begun = time.perf_counter()
            try:
                return method(group, make if callable(first) else first, *arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begun - made

        return timed


def train(rank: int, case: Case, args: argparse.Namespace, folder: str, exchanges: Exchanges) -> Row:
    """The row of one rank."""
    torch.manual_seed(0)
    whole = Path(folder) / "graph.gids"
    store = gids.FeatureStore(whole)
    (table,) = store.tables.values()
    options = {
        "memory": args.memory,
        "reads": "random",
        "tuning": gids.Tuning(cache=table.row_count * table.row_bytes // CACHE_SHARE),
    }
    if case.way == "independent":
        source: Any = gids.open(whole, **options)
    else:
        path = whole
        if case.way in ON_PARTS:
            path = Path(folder) / f"{case.ranks // case.copies}.{ON_PARTS[case.way]}"
        owners: Any = case.way if case.way in ("range", "heat") else "hash"
        source = gids.distributed.open(path, owners=owners, replicas=case.copies, bulk=case.bulk, **options)
    sampler: Sampler = Ladies([args.batch_size * n for n in args.fanouts], replace=False, threads=1)
    if case.sampler != "ladies-distinct":
        sampler = make_sampler(case.sampler, args.fanouts, args.batch_size, threads=1, kappa=case.kappa)
    together = case.way.startswith("cooperative")
    sampling = {"batch_size": args.batch_size, "shuffle": True, "cooperative": together, "seed": 0}
    loader = gids.NodeLoader(source, store.splits["_N"]["train"], sampler, **sampling)
    model = GraphSage([table.shape[0], *[args.hidden] * (len(args.fanouts) - 1), CLASSES])
    optimizer = torch.optim.Adam(model.parameters())
    seconds = dict.fromkeys(STAGES, 0.0)
    counts = {"input rows": 0, "edges": 0}
    dist.barrier()
    exchanges.seconds, before = 0.0, loader.stats()
    whole_begun = begun = time.perf_counter()
    steps = 0
    for minibatch in islice(loader, None if "ladies" in case.sampler else args.steps):
        next_s, in_next = time.perf_counter() - begun, exchanges.seconds
        seconds["sample"] += next_s - in_next
        seconds["exchange"] += in_next
        rows = minibatch.features[table.name]
        if steps == 0:
            few = minibatch.input_nodes[:32]
            assert torch.equal(rows[: len(few)], store.table(table.name).read_rows(few)), "a row differs"
        counts["input rows"] += len(rows)
        counts["edges"] += sum(block.num_edges for block in minibatch.blocks)
        begun, exchanges.seconds = time.perf_counter(), 0.0
        optimizer.zero_grad()
        h = rows
        for depth, (layer, block) in enumerate(zip(model.layers, minibatch.blocks, strict=True)):
            h = h if depth == 0 else torch.relu(h)
            h = layer(block, minibatch.exchange(depth, h) if together else h)
        torch.nn.functional.cross_entropy(h, minibatch.labels % CLASSES, reduction="sum").backward()
        if case.ranks > 1:
            at = time.perf_counter()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            exchanges.seconds += time.perf_counter() - at
        optimizer.step()
        seconds["train"] += time.perf_counter() - begun - exchanges.seconds
        seconds["exchange"] += exchanges.seconds
        exchanges.seconds, begun = 0.0, time.perf_counter()
        steps += 1
    total = time.perf_counter() - whole_begun
    after = loader.stats()
    for stage, names in (("read", ("wait",)), ("copy", ("gather", "plan"))):
        seconds[stage] = sum(after["seconds"][name] - before["seconds"][name] for name in names)
        seconds["sample"] -= seconds[stage]
    group = after.get("group", {})
    result: Row = {f"{stage} ms": 1e3 * s / steps for stage, s in seconds.items()}
    result |= {"ms": 1e3 * total / steps, "minibatches": steps}
    result |= {name: count / steps for name, count in counts.items()}
    result["pages read"] = (after["misses"] - before["misses"]) / steps
    result["rows sent"] = group.get("rows sent", 0) / steps
    dist.barrier()
    loader.close()
    source.close()
    return result


def serve(
    rank: int, size: int, meeting: str, cases: list[Case], args: argparse.Namespace, folder: str
) -> tuple[Rates, list[Row]]:
    """The rates of exchanges of so many ranks, and all cases, on one of them: medians of the repeats."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    exchanges = Exchanges()
    rows: dict[Case, list[Row]] = {case: [] for case in cases}
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        rates = network_rates(size) if size > 1 else Rates()
        stack.enter_context(exchanges.watched())
        for repeat, case in itertools.product(range(args.repeats), cases):
            if repeat and case.sampler in LADIES:
                continue
            if rank == 0:
                for path in Path(folder).rglob("*.feat*"):
                    if path.is_file():
                        drop_page_cache(path)
            dist.barrier()
            rows[case].append(train(rank, case, args, folder, exchanges))
    return rates, [
        {key: median(row[key] for row in repeats) for key in repeats[0]} for repeats in rows.values()
    ]


def network_rates(ranks: int) -> Rates:
    """With the bandwidth and latency of exchanges between all ranks, as the slowest one measures them."""

    def seconds(nbytes: int) -> float:
        sent, came = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
        best = torch.tensor(
            min(timeit.repeat(lambda: dist.all_to_all_single(came, sent), dist.barrier, number=1, repeat=8))
        )
        dist.all_reduce(best, dist.ReduceOp.MAX)
        return float(best)

    nbytes = (16 << 20) // ranks * ranks
    large, small = seconds(nbytes), seconds(ranks)
    network = nbytes * (ranks - 1) / ranks / max(large - small, 1e-9)
    return Rates(network=network, latency_s=small / (ranks - 1))


def run(size: int, cases: list[Case], args: argparse.Namespace, folder: str) -> tuple[Rates, dict[Case, Row]]:
    """The rates of exchanges, and rows of the table: means over the ranks."""
    with tempfile.TemporaryDirectory() as meeting:
        common = (size, f"{meeting}/meeting", cases, args, folder)
        if size == 1:
            by_rank = [serve(0, *common)]
        else:
            with multiprocessing.get_context("spawn").Pool(size) as pool:
                by_rank = pool.starmap(serve, [(rank, *common) for rank in range(size)], chunksize=1)
    rates, rows_of_ranks = by_rank[0][0], [rows for _, rows in by_rank]
    means = [
        {key: sum(row[key] for row in rows) / size for key in rows[0]}
        for rows in zip(*rows_of_ranks, strict=True)
    ]
    return rates, dict(zip(cases, means, strict=True))


def rates_of_rank(network: Rates, ranks: int, store: FeatureStore) -> Rates:
    """network: of exchanges. Ranks divide the disk, and the cores, of which each uses one."""
    rates = network.with_storage_of(list(store.tables.values()))
    matrix, rows = torch.rand(1024, 1024), torch.rand(1 << 24)
    product_s = min(timeit.repeat(lambda: matrix @ matrix, number=1))
    copy_s = min(timeit.repeat(rows.clone, number=1))
    cores = min(1.0, (os.cpu_count() or 1) / ranks)
    return replace(
        rates,
        storage=rates.storage / ranks,
        reads_per_s=rates.reads_per_s / ranks,
        memory=cores * 2 * rows.nbytes / copy_s,
        flops=cores * 2 * 1024**3 / product_s,
    )


def predicted(case: Case, row: Row, curves: Curves, rates: Rates, args: argparse.Namespace) -> Row:
    """A row of the second table. row: as measured."""
    (table,) = curves.tables.values()
    plan, model = Plan(table.row_count * table.row_bytes / CACHE_SHARE), Model(args.hidden, CLASSES)
    mode = case.way
    if mode not in ("independent", "cooperative"):
        mode = "partitioned" if case.copies == 1 else "1.5D"
    made = predict(curves, rates, plan, model, mode, case.ranks, case.copies)
    ms = {name: 1e3 * seconds for name, seconds in made.parts_s.items()}
    steps = curves.epoch_seeds / min(curves.epoch_seeds, case.ranks * args.batch_size)
    return {
        **{name: getattr(case, name) for name in ("way", "ranks", "copies", "sampler")},
        "pages, predicted": made.work.pages,
        "pages": row["pages read"],
        "read ms, predicted": ms["storage"],
        "read ms": row["read ms"],
        "exchange ms, predicted": ms["network"],
        "exchange ms": row["exchange ms"],
        "other ms, predicted": max(ms["memory"], ms["compute"]),
        "sample, copy, train ms": row["sample ms"] + row["copy ms"] + row["train ms"],
        "ms, predicted": 1e3 * made.seconds / steps,
        "ms": row["ms"],
    }


def cases_of(ranks: int, args: argparse.Namespace) -> list[Case]:
    several = ranks > 1 or args.small
    ways = ("independent", "cooperative") if several else ("independent",)
    samplers = (("neighbor", 1), ("labor", 1), ("labor", args.kappa))
    cases = [Case(way, ranks, sampler=name, kappa=kappa) for name, kappa in samplers for way in ways]
    if several:
        cases += [Case(way, ranks) for way in ("shared", "range", "heat")]
        cases += [Case("parts", ranks, bulk=bulk) for bulk in args.bulks]
        cases += [Case(way, ranks, sampler="labor") for way in on_parts_together(args)]
        copies = [c for c in (2, 4) if ranks % c == 0 and c < ranks]
        cases += [Case(way, ranks, copies=c) for c in copies for way in ("shared", "parts")]
        cases += [Case("parts", ranks, sampler=sampler) for sampler in LADIES]
    return cases


def on_parts_together(args: argparse.Namespace) -> list[str]:
    """The ways of cooperative minibatches of a partitioned dataset."""
    return ["cooperative, parts"] + (["cooperative, METIS"] if args.metis else [])


def partition_by_metis(store: FeatureStore, folder: Path, parts: int) -> None:
    owners = folder / f"{parts}.npy"
    np.save(owners, metis(graphs_of(store)[0], parts))
    partition(store.path, folder / f"{parts}.metis", parts, owners={"": owners})


def ranks(args: argparse.Namespace, figures: Figures) -> None:
    by_case: dict[Case, Row] = {}
    predictions: list[Row] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        spec = GraphSpec(args.nodes, dim=128, train_count=args.nodes // 2)
        store = make_dataset(Path(folder), spec, page_bytes=512)
        for parts in {ranks // copies for ranks in args.ranks for copies in (1, 2) if ranks % copies == 0}:
            partition(store.path, Path(folder) / f"{parts}.parts", parts)
        for parts in args.ranks if args.metis else []:
            partition_by_metis(store, Path(folder), parts)
        curves = {}
        for sampler in ("neighbor", "labor"):
            setting = Setting(tuple(args.fanouts), args.batch_size, sampler, threads=1)
            curves[sampler] = measure(store, setting, max(args.ranks) * args.batch_size)
        for size in args.ranks:
            network, rows = run(size, cases_of(size, args), args, folder)
            by_case |= rows
            rates = rates_of_rank(network, size, store)
            predictions += [
                predicted(case, row, curves[case.sampler], rates, args)
                for case, row in rows.items()
                if case.kappa == 1
                and case.bulk == 4
                and case.sampler in curves
                and case.way not in on_parts_together(args)
            ]
            print(f"{size} ranks: done", flush=True)
    table = [asdict(case) | row for case, row in by_case.items()]
    figures.table("milliseconds and counts of a minibatch, by way", table)
    figures.table("a minibatch as bench/scale.py predicts it, and as measured", predictions)
    for count in args.ranks:
        for sampler in LADIES:
            if layerwise := by_case.get(Case("parts", count, sampler=sampler)):
                name = f"{count} ranks, {sampler}, parts"
                figures.add(f"{name}: time", layerwise["ms"], "ms")
                figures.add(f"{name}: epoch", layerwise["ms"] * layerwise["minibatches"] / 1000, "s")
        if hottest := by_case.get(Case("heat", count)):
            ratio = hottest["ms"] / by_case[Case("shared", count)]["ms"]
            figures.add(f"{count} ranks: owners by heat over hash: time", ratio, "x")
        by_hash, by_metis = (
            by_case.get(Case(f"cooperative, {owners}", count, sampler="labor"))
            for owners in ("parts", "METIS")
        )
        if by_hash and by_metis:
            name = f"{count} ranks, labor, cooperative: parts by METIS over hash: time"
            figures.add(name, by_metis["ms"] / by_hash["ms"], "x")
    for case, row in by_case.items():
        if case.way == "cooperative" and case.ranks > 1:
            alone = by_case[Case("independent", case.ranks, sampler=case.sampler, kappa=1)]
            name = f"{case.ranks} ranks, {case.sampler}, kappa {case.kappa}"
            for what, key in (("time", "ms"), ("input rows", "input rows"), ("pages read", "pages read")):
                ratio = row[key] / max(1e-9, alone[key])
                most = 1.0 if what == "time" and case.ranks == 2 else None
                figures.add(f"{name}: cooperative over independent, kappa 1: {what}", ratio, "x", most=most)


if __name__ == "__main__":
    script = Script(__doc__, "dir")
    option = script.option
    option("nodes", 200_000, small=1000)
    option("fanouts", [10, 10], small=[3, 3])
    option("batch-size", 256, "seeds per rank", small=16)
    option("hidden", 64, small=8)
    option("memory", "300MB", "of each rank")
    option("ranks", [1, 2, 4], small=[1])
    option("bulks", [1, 4, 16], small=[1, 2])
    option("kappa", 64)
    option("steps", 16, "minibatches", small=2)
    option("repeats", 3, small=1)
    has_metis = any(importlib.util.find_spec(name) for name in ("pymetis", "dgl"))
    option("metis", has_metis, action=argparse.BooleanOptionalAction)
    script.run(ranks)
