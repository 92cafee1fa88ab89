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

replicas: 1.5D (Tripathy, Yelick and Buluc): parts P / c, each on c ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cooperation_counts import Sampled, ask, pages_of, received, replicate, sample, unite
from graphs import GRAPHS, OWNERS, Ids, OwnersOf, make_graph, seed_order
from harness import Figures, integers, make_parser

from gids.sampler import Labor, Neighbor, Sampler, Topology

ROWS_PER_PAGE = 8  # rows of 512 bytes in pages of 4 KiB
SAMPLERS = {"Neighbor": Neighbor, "LABOR-0": Labor}
Row = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "seed")
    add = parser.add_argument
    add("--plot", type=Path, metavar="FILE", help="draw rows per rank to FILE, as PNG")
    add("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    add("--log2-nodes", type=int, default=24, help="size of the graphs (default: 24)")
    add("--degree", type=int, default=16)
    add("--fanouts", type=integers, default=[10, 10, 10])
    add("--batch-size", type=int, default=1024, help="seeds per rank (default: 1024)")
    add("--ranks", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    add("--steps", type=int, default=1, help="steps to count rows in (default: 1)")
    add("--threads", type=int)
    args = parser.parse_args(argv)
    if args.small:
        args.log2_nodes, args.batch_size, args.steps = 13, 4, 1
        args.ranks, args.fanouts = [1, 2, 4, 16], [3, 3]
    return args


class Case:
    """A graph, with what is computed once for it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
        self.topology = Topology(self.graph)
        self.owners = OwnersOf(self.graph)
        self.in_degrees = np.diff(self.graph.indptr)
        self.node_count: int = self.graph.num_dst
        self._seeds = seed_order(self.graph, args.seed)

    def seeds(self, step: int, ranks: int) -> Ids:
        """The seeds of all ranks in a step: the first batch_size of them are those of rank 0, and so on."""
        count = ranks * self.args.batch_size
        return self._seeds.take(range(step * count, (step + 1) * count), mode="wrap")

    def sample_each(self, sampler: Sampler, seeds: Ids, step: int) -> list[Sampled]:
        """The minibatch of each rank."""
        size = self.args.batch_size
        parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        return [sample(sampler, self.topology, part, step, keep_blocks=False) for part in parts]

    def pages(self, positions: np.ndarray, rows: Ids) -> int:
        """The pages of rows that are stored in the order of positions."""
        return pages_of(positions[rows], ROWS_PER_PAGE, -(-self.node_count // ROWS_PER_PAGE))


# Rows


def count_rows(case: Case, sampler: Sampler) -> tuple[list[Row], list[Sampled]]:
    """A row for each number of ranks, and the minibatches of as many ranks in the last step."""
    args, counted = case.args, defaultdict(list)
    layouts = {"id": np.arange(case.node_count), "community": case.owners.community}
    for step in range(args.steps):
        seeds = case.seeds(step, max(args.ranks))
        alone = case.sample_each(sampler, seeds, step)
        unions = dict(enumerate(unite(alone, case.node_count), 1))
        pages = {name: [case.pages(positions, m.nodes) for m in alone] for name, positions in layouts.items()}
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
            row["ratio"] = row["cooperative rows"] / row["independent rows"]
            for method in OWNERS:
                owners = case.owners(method, ranks)
                by_layer = received(together, owners, ranks)
                assert ranks > 1 or not by_layer[0].any()
                row[f"rows sent, {method}"] = by_layer[0].mean()
                row[f"ids sent, {method}"] = sum(layer.mean() for layer in by_layer)
                row[f"largest, {method}"] = np.bincount(owners[union], minlength=ranks).max()
            for name, positions in layouts.items():
                row[f"independent pages, {name}"] = np.mean(pages[name][:ranks])
                row[f"shared pages, {name}"] = case.pages(positions, union) / ranks
            counted[ranks].append(row)
    means = [{key: float(np.mean([row[key] for row in rows])) for key in row} for rows in counted.values()]
    return [row | {"P": int(row["P"])} for row in means], alone


def grid_sizes(ranks: int) -> Iterable[int]:
    """Numbers of copies of each part, of 1.5D."""
    return (1 << i for i in range(ranks.bit_length()))


def count_replicas(case: Case, alone: Sequence[Sampled]) -> list[Row]:
    """What a rank asks of its column for its own minibatch, by the number of copies of each part."""
    rows, ranks = [], len(alone)
    for copies in grid_sizes(ranks):
        parts = ranks // copies
        row: Row = {"P": ranks, "c": copies, "held": 1 / parts}
        for method in ("hash", "community"):
            owners = case.owners(method, parts)
            foreign = [owners[m.nodes] != rank // copies for rank, m in enumerate(alone)]
            asked = [
                ask(m, f, case.in_degrees, case.args.fanouts) for m, f in zip(alone, foreign, strict=True)
            ]
            requests, drawn, adjacent = 8 * np.sum(asked, axis=0) / ranks
            row[f"rows, {method}"] = np.mean([np.count_nonzero(f) for f in foreign])
            row[f"sampling bytes, {method}"] = requests + drawn
            row[f"adjacency bytes, {method}"] = requests + adjacent
        rows.append(row)
    return rows


def count_adjacency(case: Case, alone: Sequence[Sampled]) -> list[Row]:
    """Published 1.5D sampling in bulk, compared with its law: kbd (1 / c + c / P)."""
    rows, ranks = [], len(alone)
    for copies in (c for c in grid_sizes(ranks) if c**2 <= ranks):
        words = replicate(alone, case.owners("hash", ranks // copies), case.in_degrees, ranks, copies)
        law = words.total * (1 / copies + copies / ranks)
        counted = words.stages + words.reduced
        rows.append(
            {
                "P": ranks,
                "c": copies,
                "harmonic mean of P/c and c": 2 / (copies / ranks + 1 / copies),
                "law": law,
                "kbd / c": words.total / copies,
                "stages": words.stages,
                "c kbd / P": words.total * copies / ranks,
                "reduced": words.reduced,
                "counted": counted,
                "counted / law": counted / law,
                "received": words.received + words.reduced,
            }
        )
    return rows


def main() -> None:
    args = parse()
    figures = Figures(args)
    panels: dict[tuple[str, str], list[Row]] = {}
    for name in args.graphs:
        case = Case(name, args)
        print(f"\n## {name}: {case.node_count:,} nodes, {case.graph.num_edges:,} edges")
        for kind, make in SAMPLERS.items():
            rows, alone = count_rows(case, make(args.fanouts, threads=args.threads))
            panels[name, kind] = rows
            pages = [key for key in rows[0] if "pages" in key]
            title = f"{name}, {kind}"
            kept = [{key: row[key] for key in row if key not in pages} for row in rows]
            figures.table(f"{title}: input rows per rank", kept)
            by_order = (
                f"{title}: pages of {ROWS_PER_PAGE} rows per rank, rows in the order of ids or communities"
            )
            figures.table(by_order, [{key: row[key] for key in ("P", *pages)} for row in rows])
            square = [ranks for ranks in args.ranks if ranks >= 4 and ranks**0.5 % 1 == 0]
            replicas = [row for ranks in square for row in count_replicas(case, alone[:ranks])]
            figures.table(f"{title}: 1.5D, per rank and minibatch", replicas)
            words = [row for ranks in square for row in count_adjacency(case, alone[:ranks])]
            figures.table(f"{title}: 1.5D with adjacency rows, words of a bulk", words)
    if args.plot:
        from plot import draw_cooperation

        draw_cooperation(panels, args.plot)


if __name__ == "__main__":
    main()
