"""What do ranks read and send if they work on one large minibatch, share features or topology, or work alone?

    python bench/cooperation.py           # 17 million nodes, 1 to 64 ranks; 11 GB of memory, half an hour
    python bench/cooperation.py --small   # seconds; only shows that it works

Counted in one process with our samplers; nothing is sent and nothing is timed. Two graphs of 16 edges per
node: R-MAT, and clustered (classes of a thousand nodes, 90 % of edges within one). 1,024 seeds per rank in
random order, fanouts 10, 10, 10.

rows: per rank and step, the mean over ranks and steps. Independent: each rank samples its own seeds.
Cooperative: one minibatch of all seeds, each node belongs to its owner (Balin et al.). The union of the
independent minibatches is compared with the cooperative one: they are equal, as random numbers are keyed by
node. Baseline: independent.

caches: rows missed by a cache on each rank after a warm-up, independent and cooperative, with and without
dependent minibatches. replicas: 1.5D (Tripathy, Yelick and Buluc): parts P / c, each on c ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cooperation_counts import (
    Asked,
    Caches,
    Sampled,
    ask,
    pages_of,
    received,
    replicate,
    sample,
    unite,
)
from graphs import GRAPHS, OWNERS, Ids, OwnersOf, make_graph, out_degrees, print_table, seed_order
from harness import integers, make_parser, write_json

from gids.sampler import Labor, Neighbor, Sampler, Topology
from gids.store import Graph

ROWS_PER_PAGE = 8  # rows of 512 bytes in pages of 4 KiB
KAPPA = 256
Row = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "json", "seed")
    add = parser.add_argument
    add("--plot", type=Path, metavar="FILE", help="draw rows per rank to FILE, as PNG")
    add("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    add("--only", choices=["rows", "caches"], help="count only these (rows: with replicas)")
    add("--log2-nodes", type=int, default=24, help="size of the graphs (default: 24)")
    add("--degree", type=int, default=16)
    add("--fanouts", type=integers, default=[10, 10, 10])
    add("--batch-size", type=int, default=1024, help="seeds per rank (default: 1024)")
    add("--ranks", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    add("--steps", type=int, default=1, help="steps to count rows in (default: 1)")
    add("--cache-ranks", type=integers, default=[8])
    add("--cache-percents", type=integers, default=[1, 3], help="of all rows, on each rank")
    add("--cache-steps", type=int, default=10, help="steps to count misses in, after half as many")
    add("--cache-samplers", nargs="+", choices=["LABOR-0", "Neighbor"], default=["LABOR-0", "Neighbor"])
    add("--threads", type=int)
    args = parser.parse_args(argv)
    if args.small:
        args.log2_nodes, args.batch_size, args.steps, args.cache_steps = 13, 4, 1, 4
        args.ranks, args.cache_ranks, args.fanouts = [1, 2, 4, 16], [4], [3, 3]
    return args


class Case:
    """A graph, with what is computed once for it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.graph: Graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
        self.topology = Topology(self.graph)
        self.owners = OwnersOf(self.graph)
        self.in_degrees = np.diff(self.graph.indptr)
        self._seeds = seed_order(self.graph, args.seed)

    @property
    def node_count(self) -> int:
        return self.graph.num_dst

    def seeds(self, step: int, ranks: int) -> Ids:
        """The seeds of all ranks in a step: the first batch_size of them are those of rank 0, and so on."""
        count = ranks * self.args.batch_size
        return self._seeds.take(range(step * count, (step + 1) * count), mode="wrap")

    def of_ranks(self, sampler: Sampler, seeds: Ids, step: int) -> list[Sampled]:
        size = self.args.batch_size
        parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        return [sample(sampler, self.topology, part, step, keep_blocks=False) for part in parts]


def make_samplers(args: argparse.Namespace) -> dict[str, Sampler]:
    return {
        "Neighbor": Neighbor(args.fanouts, threads=args.threads),
        "LABOR-0": Labor(args.fanouts, threads=args.threads),
    }


# Rows


def count_rows(case: Case, sampler: Sampler) -> tuple[list[Row], list[Row], list[Row]]:
    """(rows by number of ranks, 1.5D features and ids, 1.5D adjacency rows)."""
    args, found = case.args, defaultdict(list)
    layouts = {"id": np.arange(case.node_count), "community": case.owners.community}
    for step in range(args.steps):
        seeds = case.seeds(step, max(args.ranks))
        alone = case.of_ranks(sampler, seeds, step)
        unions = dict(enumerate(unite(alone, case.node_count), 1))
        pages = {
            layout: [page_count(case, positions, m.nodes) for m in alone]
            for layout, positions in layouts.items()
        }
        for ranks in args.ranks:
            together = sample(
                sampler, case.topology, seeds[: ranks * args.batch_size], step, keep_blocks=True
            )
            union = unions[ranks]
            assert np.array_equal(np.sort(together.nodes), union), "the union is the global minibatch"
            row: Row = {
                "P": ranks,
                "independent rows": np.mean([len(m.nodes) for m in alone[:ranks]]),
                "cooperative rows": len(union) / ranks,
            }
            for method in OWNERS:
                owners = case.owners(method, ranks)
                by_layer = received(together, owners, ranks)
                assert ranks > 1 or not by_layer[0].any()
                row[f"largest, {method}"] = np.bincount(owners[union], minlength=ranks).max()
                row[f"rows sent, {method}"] = by_layer[0].mean()
                row[f"ids sent, {method}"] = sum(layer.mean() for layer in by_layer)
            for layout, positions in layouts.items():
                row[f"independent pages, {layout}"] = np.mean(pages[layout][:ranks])
                row[f"shared pages, {layout}"] = page_count(case, positions, union) / ranks
            found[ranks].append(row)
    square = [ranks for ranks in args.ranks if ranks >= 4 and ranks**0.5 % 1 == 0]
    features = [row for ranks in square for row in count_replicas(case, alone[:ranks])]
    rows = [row for ranks in square for row in count_adjacency(case, alone[:ranks])]
    return [mean_of(rows_of) for rows_of in found.values()], features, rows


def page_count(case: Case, positions: np.ndarray, rows: Ids) -> int:
    return pages_of(positions[rows], ROWS_PER_PAGE, -(-case.node_count // ROWS_PER_PAGE))


def mean_of(rows: Sequence[Row]) -> Row:
    return {
        key: float(np.mean([row[key] for row in rows])) if key != "P" else rows[0][key] for key in rows[0]
    }


def count_replicas(case: Case, alone: Sequence[Sampled]) -> list[Row]:
    """What a rank asks of its column for its own minibatch, by the number of copies of each part."""
    found, ranks = [], len(alone)
    for copies in (1 << i for i in range(ranks.bit_length())):
        parts = ranks // copies
        row: Row = {"P": ranks, "c": copies, "held": 1 / parts}
        for method in ("hash", "community"):
            owners = case.owners(method, parts)
            foreign = [m.foreign(owners, rank // copies) for rank, m in enumerate(alone)]
            asked = sum(
                (ask(m, f, case.in_degrees, case.args.fanouts) for m, f in zip(alone, foreign, strict=True)),
                Asked(0, 0, 0),
            )
            row[f"rows, {method}"] = np.mean([np.count_nonzero(f) for f in foreign])
            row[f"sampling bytes, {method}"] = asked.sampling_bytes / ranks
            row[f"adjacency bytes, {method}"] = asked.adjacency_bytes / ranks
        found.append(row)
    return found


def count_adjacency(case: Case, alone: Sequence[Sampled]) -> list[Row]:
    """Published 1.5D sampling in bulk, compared with its law: kbd (1 / c + c / P)."""
    found, ranks = [], len(alone)
    for copies in (1 << i for i in range(ranks.bit_length())):
        if copies**2 > ranks:
            break
        counted = replicate(alone, case.owners("hash", ranks // copies), case.in_degrees, ranks, copies)
        law = counted.total * (1 / copies + copies / ranks)
        path = counted.stages + counted.reduced
        found.append(
            {
                "P": ranks,
                "c": copies,
                "harmonic mean of P/c and c": 2 / (copies / ranks + 1 / copies),
                "law": law,
                "kbd / c": counted.total / copies,
                "stages": counted.stages,
                "c kbd / P": counted.total * copies / ranks,
                "reduced": counted.reduced,
                "counted": path,
                "counted / law": path / law,
                "received": counted.received + counted.reduced,
            }
        )
    return found


# Caches


def count_misses(case: Case) -> list[Row]:
    """Rows missed per rank and step, for each number of ranks, cache and way of working."""
    args, found = case.args, []
    weights = out_degrees(case.graph)
    makers = {"LABOR-0": Labor, "Neighbor": Neighbor}
    kinds: dict[str, Sampler] = {
        name if kappa == 1 else f"{name}, κ = {kappa}": makers[name](
            args.fanouts, batch_dependency=kappa, threads=args.threads
        )
        for name in args.cache_samplers
        for kappa in (1, KAPPA)
    }
    for ranks in args.cache_ranks:
        owners = case.owners("hash", ranks)
        settings = [(p, policy) for p in args.cache_percents for policy in ("lru", "static")]
        for kind, sampler in kinds.items():
            caches = {
                (way, *setting): Caches(
                    ranks, case.node_count * setting[0] // 100, setting[1], weights, owned
                )
                for setting in settings
                for way, owned in (("independent", None), ("cooperative", owners))
            }
            missed: dict[tuple[Any, ...], list[float]] = defaultdict(list)
            asked: dict[str, list[float]] = defaultdict(list)
            warm = args.cache_steps // 2
            for step in range(warm + args.cache_steps):
                alone = [m.nodes for m in case.of_ranks(sampler, case.seeds(step, ranks), step)]
                *_, union = unite_ids(alone, case.node_count)
                rows = {
                    "independent": alone,
                    "cooperative": [union[owners[union] == r] for r in range(ranks)],
                }
                for key, cache in caches.items():
                    misses = cache.misses(rows[key[0]]).mean()
                    if step >= warm:
                        missed[key].append(float(misses))
                if step >= warm:
                    for way, of_ranks in rows.items():
                        asked[way].append(float(np.mean([len(r) for r in of_ranks])))
            found += [
                {
                    "P": ranks,
                    "sampler": kind,
                    "cache %": percent,
                    "policy": policy,
                    "independent rows": np.mean(asked["independent"]),
                    "cooperative rows": np.mean(asked["cooperative"]),
                    "independent misses": np.mean(missed["independent", percent, policy]),
                    "cooperative misses": np.mean(missed["cooperative", percent, policy]),
                }
                for percent, policy in settings
            ]
    return found


def unite_ids(rows: Sequence[Ids], node_count: int) -> list[Ids]:
    return list(unite([Sampled(nodes, [], []) for nodes in rows], node_count))


# Output


def show_rows(name: str, rows: Sequence[Row]) -> None:
    columns = ["P", "independent", "cooperative", "ratio", *(f"sent, {m}" for m in OWNERS), "largest, hash"]
    columns += ["largest, community", "ids, hash", "ids, community"]
    lines = [
        [
            r["P"],
            r["independent rows"],
            r["cooperative rows"],
            r["cooperative rows"] / r["independent rows"],
            *(r[f"rows sent, {m}"] for m in OWNERS),
            r["largest, hash"],
            r["largest, community"],
            r["ids sent, hash"],
            r["ids sent, community"],
        ]
        for r in rows
    ]
    print_table(f"{name}: input rows per rank", columns, lines)
    kinds = [f"{way} pages, {layout}" for layout in ("id", "community") for way in ("independent", "shared")]
    print_table(
        f"{name}: pages of {ROWS_PER_PAGE} rows per rank, rows in the order of ids or communities",
        ["P", *kinds],
        [[r["P"], *(r[k] for k in kinds)] for r in rows],
    )


def show(title: str, rows: Sequence[Row]) -> None:
    if rows:
        print_table(title, list(rows[0]), [list(row.values()) for row in rows])


def show_misses(name: str, rows: Sequence[Row]) -> None:
    """Each against the independent minibatches of the same sampler with κ = 1, cache and policy."""
    base = {(r["P"], r["sampler"], r["cache %"], r["policy"]): r["independent misses"] for r in rows}
    lines = []
    for r in rows:
        plain = r["sampler"].partition(",")[0]
        against = base[r["P"], plain, r["cache %"], r["policy"]]
        both = (r["independent misses"], r["cooperative misses"])
        lines.append([*list(r.values())[:4], *both, *(m / against for m in both)])
    columns = ["P", "sampler", "cache %", "policy", "independent", "cooperative"]
    print_table(
        f"{name}: rows missed per rank, and their ratio to independent ones with κ = 1",
        [*columns, "ratio, independent", "ratio, cooperative"],
        lines,
    )


def main() -> None:
    args = parse()
    result: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    for name in args.graphs:
        case = Case(name, args)
        print(f"\n## {name}: {case.node_count:,} nodes, {case.graph.num_edges:,} edges")
        of_graph = result[name] = {}
        if args.only != "caches":
            for kind, sampler in make_samplers(args).items():
                rows, features, adjacency = count_rows(case, sampler)
                of_graph[kind] = {"rows": rows, "features": features, "adjacency": adjacency}
                show_rows(f"{name}, {kind}", rows)
                show(f"{name}, {kind}: 1.5D, per rank and minibatch", features)
                show(f"{name}, {kind}: 1.5D with adjacency rows, words of a bulk", adjacency)
        if args.only != "rows":
            of_graph["caches"] = count_misses(case)
            show_misses(name, of_graph["caches"])
        sys.stdout.flush()
        write_json(args.json, result)
    if args.plot and args.only != "caches":
        from cooperation_plot import draw_to

        draw_to(args.plot, result, args.graphs, list(make_samplers(args)))


if __name__ == "__main__":
    main()
