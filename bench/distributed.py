"""What do ranks read and send in an epoch, by mode? Real processes, compared with counting in one process.

    python bench/distributed.py           # 262,144 nodes, 1 to 64 ranks; ten minutes
    python bench/distributed.py --small   # seconds; only shows that it works

Processes on this machine (gloo) read an epoch in every mode; every row is verified. One process counts the
same minibatches for more ranks; where both are run, all counts must be equal. Nothing is timed.

alone: each rank reads for itself. shared rows: each page has an owner, which reads it for all; the dataset
is not divided. partitioned: rows and edges are divided by hash; owners draw. replicas 2: parts P / 2, each on
two ranks. cooperative: one minibatch of all ranks, each node on its owner, which has the node's page.

pages: that ranks ask their cache for. Partitioned features ask for no page twice in a step: the sum over
ranks is the number of distinct pages. adjacency rows: what sampling sends if owners send all in-edges of a
node, as in the published algorithm, in place of at most fanout.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cooperation_counts import Sampled, ask, pages_of, received, unite
from distributed_ranks import MODES, TABLE, make_loader, replicas_of, run_ranks
from graphs import GRAPHS, Ids, make_graph, seed_order
from harness import Figures, NumberedRows, integers, make_parser

import gids
from gids.distributed.owners import HashOwners
from gids.store import Graph
from gids.store.names import RELATION
from gids.write import DatasetWriter
from gids.write.partition import partition
from gids.write.partition.owners import hash_owners

PAGE_BYTES = 4096
SUMS = ("rows", "pages", "rows sent", "ids sent", "nodes asked", "edges sent", "bytes sent")
Row = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "dir", "seed")
    add = parser.add_argument
    add("--graph", choices=GRAPHS, default="R-MAT")
    add("--sampler", choices=["neighbor", "labor"], default="neighbor")
    add("--log2-nodes", type=int, default=18, help="size of the graph (default: 18)")
    add("--degree", type=int, default=16)
    add("--dim", type=int, default=128, help="float32 features per node (default: 128)")
    add("--fanouts", type=integers, default=[10, 10])
    add("--batch-size", type=int, default=64, help="seeds per rank (default: 64)")
    add("--processes", type=integers, default=[1, 2, 4], help="numbers of real ranks (default: 1,2,4)")
    add("--ranks", type=integers, default=[1, 2, 4, 8, 16, 32, 64], help="to count for (default: 1 to 64)")
    args = parser.parse_args(argv)
    if args.small:
        args.log2_nodes, args.batch_size, args.fanouts, args.dim = 12, 8, [3, 3], 128
        args.processes, args.ranks = [2], [1, 2, 4]
    return args


class Case:
    """A dataset with known rows, its graph, and the minibatches of each number of ranks."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.path = args, folder, folder / "whole.gids"
        self.graph: Graph = make_graph(args.graph, args.log2_nodes, args.degree, args.seed)
        with DatasetWriter(self.path, page_bytes=PAGE_BYTES) as writer:
            writer.write_table("node", "_N", "feat", NumberedRows(self.count, args.dim))
            writer.write_graph(RELATION, self.graph.indptr, self.graph.indices, num_src=self.count)
        store = gids.FeatureStore(self.path)
        self.table = store.table(TABLE)
        self.degrees = np.diff(self.graph.indptr)
        steps = max(args.ranks) * args.batch_size
        self.config = {
            "seeds": seed_order(self.graph, args.seed)[:steps].tolist(),
            "sampler": args.sampler,
            "fanouts": args.fanouts,
            "batch_size": args.batch_size,
            "seed": args.seed,
            "memory": "256MB",
            "row_bytes": self.table.row_bytes,
        }

    @property
    def count(self) -> int:
        return self.graph.num_dst

    def dataset(self, mode: str, ranks: int) -> Path:
        """The dataset that a mode opens."""
        if mode not in ("partitioned", "replicas 2"):
            return self.path
        parts = ranks // replicas_of(mode)
        out = self.folder / f"parts-{parts}"
        if not out.exists():
            partition(self.path, out, parts)
        return out

    def owners(self, mode: str, parts: int) -> Ids:
        if mode in ("partitioned", "replicas 2"):
            owners = np.concatenate(list(hash_owners("_N", self.count, parts, 0)))
        else:
            owners = HashOwners(parts, self.table.rows_per_page).of(np.arange(self.count))
        return owners.astype(np.uint8)

    def steps(self, ranks: int) -> Iterator[tuple[list[Sampled], Sampled]]:
        """Of each step: the ranks' minibatches, and the one of all their seeds."""
        size = self.args.batch_size
        with gids.open(self.path, memory="64MB") as source:
            own = [
                make_loader(source, self.config, tables=[], rank=r, world_size=ranks) for r in range(ranks)
            ]
            options = {"tables": [], "rank": 0, "world_size": 1, "batch_size": ranks * size}
            whole = make_loader(source, self.config, **options)
            for *of_ranks, together in zip(*own, whole, strict=True):
                yield [Sampled.of(m) for m in of_ranks], Sampled.of(together)
            for loader in (*own, whole):
                loader.close()


def edges_of(minibatch: Sampled, foreign: np.ndarray) -> int:
    """Edges that other ranks draw."""
    degrees = [np.diff(block.indptr.numpy()) for block in minibatch.blocks]
    return int(sum(of_block[foreign[: len(of_block)]].sum() for of_block in degrees))


def pages_by_part(owners: Ids, parts: int, rows_per_page: int) -> Ids:
    """The page of each row, in parts that hold their rows by ascending id. Pages of parts are distinct."""
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=parts)
    place = np.empty(len(owners), np.int64)
    place[order] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    pages = -(-counts // rows_per_page)
    return place // rows_per_page + (np.cumsum(pages) - pages)[owners]


def count_epoch(case: Case, ranks: int) -> dict[str, Row]:
    """By mode: the sums over ranks and steps."""
    modes = [m for m in MODES if ranks > 1 or m != "replicas 2"]
    totals: dict[str, Row] = {mode: dict.fromkeys((*SUMS, "adjacency bytes"), 0) for mode in modes}
    parts = {mode: ranks // replicas_of(mode) for mode in modes}
    owners = {mode: case.owners(mode, parts[mode]) for mode in modes}
    per_page = case.table.rows_per_page
    weight = 4 if case.args.sampler == "labor" else 0
    for of_ranks, together in case.steps(ranks):
        totals["alone"]["rows"] += sum(len(m.nodes) for m in of_ranks)
        totals["alone"]["pages"] += sum(len(np.unique(m.nodes // per_page)) for m in of_ranks)
        for mode in ("shared rows", "partitioned", "replicas 2"):
            if mode not in modes:
                continue
            total, copies = totals[mode], replicas_of(mode)
            divided = mode != "shared rows"
            pages = np.arange(case.count) // per_page
            if divided:
                pages = pages_by_part(owners[mode], parts[mode], per_page)
            total["rows"] += sum(len(m.nodes) for m in of_ranks)
            for column in range(copies):
                *_, union = unite(of_ranks[column::copies], case.count)
                total["pages"] += pages_of(pages[union], 1, int(pages.max()) + 1)
            for rank, minibatch in enumerate(of_ranks):
                foreign = minibatch.foreign(owners[mode], rank // copies)
                total["rows sent"] += int(np.count_nonzero(foreign))
                if divided:
                    asked = ask(minibatch, foreign, case.degrees, case.args.fanouts)
                    total["nodes asked"] += asked.requests
                    total["adjacency bytes"] += 12 * asked.requests + 16 * asked.adjacent
                    total["edges sent"] += edges_of(minibatch, foreign)
            total["ids sent"] = total["rows sent"]
            total["bytes sent"] = 12 * total["nodes asked"] + (16 + weight) * total["edges sent"]
        total = totals["cooperative"]
        by_layer = received(together, owners["cooperative"], ranks)
        total["rows"] += len(together.nodes)
        total["pages"] += len(np.unique(together.nodes // per_page))
        total["rows sent"] += int(by_layer[0].sum())
        total["ids sent"] += int(sum(layer.sum() for layer in by_layer))
    return totals


def check(mode: str, real: Sequence[Mapping[str, int]], counted: Row) -> None:
    """Raise AssertionError unless the processes counted the same and read no page twice in a step."""
    names = [n for n in SUMS if any(n in of_rank for of_rank in real)]
    for name in names:
        by_processes = sum(of_rank[name] for of_rank in real)
        assert by_processes == counted[name], (
            f"{mode}: {name}: {by_processes} by processes, {counted[name]} counted"
        )
    read, pages = (sum(of_rank[n] for of_rank in real) for n in ("pages read", "pages"))
    assert read <= pages, f"{mode}: {read} pages read, {pages} distinct"


def main() -> None:
    args = parse()
    figures, rows = Figures(args), []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        case = Case(args, Path(folder))
        print(f"{args.graph}: {case.count:,} nodes, {args.sampler} {args.fanouts}")
        for ranks in args.ranks:
            counted = count_epoch(case, ranks)
            processes: dict[str, list[dict[str, int]]] = {}
            if ranks in args.processes:
                datasets = {mode: case.dataset(mode, ranks) for mode in counted}
                processes = run_ranks(ranks, datasets, case.config)
            for mode, row in counted.items():
                if mode in processes:
                    check(mode, processes[mode], row)
                checked = "processes" if mode in processes else "-"
                feature_bytes = row["rows sent"] * case.table.row_bytes + 8 * row["ids sent"]
                rows.append(
                    {"P": ranks, "mode": mode, "checked": checked, **row, "feature bytes": feature_bytes}
                )
                print(f"{ranks} ranks, {mode}: {row['pages']} pages, {row['rows sent']} rows", flush=True)
    columns = ("P", "mode", "checked", "rows", "pages", "rows sent", "ids sent", "feature bytes")
    figures.table("an epoch, sum over ranks", [{c: row[c] for c in columns} for row in rows])
    columns = ("P", "mode", "nodes asked", "edges sent", "bytes sent", "adjacency bytes")
    sampling = [{c: row[c] for c in columns} for row in rows if row["adjacency bytes"]]
    figures.table("sampling, sum over ranks", sampling)


if __name__ == "__main__":
    main()
