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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from cooperation_counts import Sampled, ask, pages_of, received, replicate, sample, unite
from graphs import GRAPHS, OWNERS, Ids, OwnersOf, make_graph, seed_order
from harness import Figures, Script

from gids.bench.plot import Curve, plot_curves
from gids.sampler import Labor, Neighbor, Sampler, Topology

ROWS_PER_PAGE = 8  # rows of 512 bytes in pages of 4 KiB
SAMPLERS = {"Neighbor": Neighbor, "LABOR-0": Labor}
DRAWN = {
    "independent rows": "independent: read",
    "cooperative rows": "cooperative: read",
    "rows sent, hash": "cooperative: received, owners by hash",
    "rows sent, community": "cooperative: received, owners by community",
}
Row = dict[str, Any]


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


def cooperation(args: argparse.Namespace, figures: Figures) -> None:
    panels: dict[str, list[Curve]] = {}
    for name in args.graphs:
        case = Case(name, args)
        print(f"\n## {name}: {case.node_count:,} nodes, {case.graph.num_edges:,} edges")
        for kind, make in SAMPLERS.items():
            rows, alone = count_rows(case, make(args.fanouts, threads=args.threads))
            title = f"{name}, {kind}"
            panels[title] = [
                (label, args.ranks, [row[key] / 1000 for row in rows]) for key, label in DRAWN.items()
            ]
            pages = {key for key in rows[0] if "pages" in key}
            kept = [{key: row[key] for key in row if key not in pages} for row in rows]
            figures.table(f"{title}: input rows per rank", kept)
            orders = f"pages of {ROWS_PER_PAGE} rows per rank, rows in the order of ids or communities"
            figures.table(
                f"{title}: {orders}", [{k: row[k] for k in row if k in pages | {"P"}} for row in rows]
            )
            square = [ranks for ranks in args.ranks if ranks >= 4 and ranks**0.5 % 1 == 0]
            replicas = [row for ranks in square for row in count_replicas(case, alone[:ranks])]
            figures.table(f"{title}: 1.5D, per rank and minibatch", replicas)
            words = [row for ranks in square for row in count_adjacency(case, alone[:ranks])]
            figures.table(f"{title}: 1.5D with adjacency rows, words of a bulk", words)
    if args.plot:
        titles = ("ranks", "rows per rank (thousands)")
        plot_curves(args.plot, "Input rows per rank and step", panels, titles, log_x=True)


if __name__ == "__main__":
    script = Script(__doc__, "seed", "plot")
    option = script.option
    option("graphs", list(GRAPHS), choices=GRAPHS)
    option("log2-nodes", 24, "size of the graphs", small=13)
    option("degree", 16)
    option("fanouts", [10, 10, 10], small=[3, 3])
    option("batch-size", 1024, "seeds per rank", small=4)
    option("ranks", [1, 2, 4, 8, 16, 32, 64], small=[1, 2, 4, 16])
    option("steps", 1, "steps to count rows in")
    option("threads", type=int)
    script.run(cooperation)
