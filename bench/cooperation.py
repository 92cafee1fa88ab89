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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from graphs import GRAPHS, OWNERS, Ids, Owners, OwnersOf, make_graph, seed_order
from harness import Figures, Script

from gids.bench.plot import Curve, plot_curves
from gids.sampler import Block, Labor, Neighbor, Sampler, Topology

ROWS_PER_PAGE = 8  # rows of 512 bytes in pages of 4 KiB
SAMPLERS = {"Neighbor": Neighbor, "LABOR-0": Labor}
DRAWN = {
    "independent rows": "independent: read",
    "cooperative rows": "cooperative: read",
    "rows sent, hash": "cooperative: received, owners by hash",
    "rows sent, community": "cooperative: received, owners by community",
}
Row = dict[str, Any]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampled:
    """A minibatch on the host. nodes: the input nodes. frontiers: how many of them, from the first on, draw
    neighbors in each layer, from the seeds' layer on. blocks: from the input layer on."""

    nodes: Ids
    frontiers: list[int]
    blocks: list[Block]


def sample(sampler: Sampler, topology: Topology, seeds: Ids, step: int, *, keep_blocks: bool) -> Sampled:
    minibatch = sampler.sample(topology, torch.from_numpy(seeds), step=step, seed=0)
    blocks = [block for block in minibatch.blocks if isinstance(block, Block)]
    assert isinstance(minibatch.input_nodes, torch.Tensor)
    frontiers = [block.num_dst for block in reversed(blocks)]
    return Sampled(minibatch.input_nodes.numpy(), frontiers, blocks if keep_blocks else [])


def unite(minibatches: Sequence[Sampled], node_count: int) -> Iterator[Ids]:
    """The union of the input nodes of the first 1, 2, 3, … minibatches: int64[n], ascending."""
    marks = np.zeros(node_count, np.bool_)
    for minibatch in minibatches:
        marks[minibatch.nodes] = True
        yield np.flatnonzero(marks)


def received(minibatch: Sampled, owners: Owners, ranks: int) -> list[Counts]:
    """Cooperative: the sources that each rank gets from other ranks, by layer, from the input layer on.

    A rank computes the destinations that it owns, so it needs their sources, each once. int64[ranks] each.
    """
    of_nodes, found = owners[minibatch.nodes], []
    for block in minibatch.blocks:
        ranks_of_edges = np.repeat(of_nodes[: block.num_dst].astype(np.int64), np.diff(block.indptr.numpy()))
        needed = np.zeros(ranks * block.num_src, np.bool_)
        needed[ranks_of_edges * block.num_src + block.indices.numpy()] = True
        needed = needed.reshape(ranks, block.num_src)
        needed[of_nodes[: block.num_src], np.arange(block.num_src)] = False
        found.append(np.count_nonzero(needed, axis=1).astype(np.int64))
    return found


def ask(
    minibatch: Sampled, foreign: npt.NDArray[np.bool_], in_degrees: Counts, fanouts: Sequence[int]
) -> Counts:
    """What one rank sends and gets for a minibatch if the owners of nodes sample for it: int64[3].

    The ids that it sends; the ids that it gets, at most fanout for each; and those that it gets instead if
    whole adjacency rows are sent. fanouts: from the input layer on, all 1 or more.
    """
    asked = np.zeros(3, np.int64)
    for frontier, fanout in zip(minibatch.frontiers, reversed(fanouts), strict=True):
        degrees = in_degrees[minibatch.nodes[:frontier][foreign[:frontier]]]
        asked += [len(degrees), np.minimum(degrees, fanout).sum(), degrees.sum()]
    return asked


def replicate(
    minibatches: Sequence[Sampled], owners: Owners, in_degrees: Counts, ranks: int, copies: int
) -> Row:
    """Words of 1.5D sampling of P minibatches with whole adjacency rows, compared with the law
    kbd (1 / c + c / P), where kbd is the adjacency rows of all frontiers. Algorithm 2 of Tripathy, Yelick and
    Buluc (2024).

    owners: of ranks / copies parts. copies^2 divides ranks. Row i of the grid samples `copies` minibatches.
    Its rank in column j gets the adjacency rows of parts j * ranks / copies^2 and on, a part in each stage.

    stages: the largest message sum of a sender in a stage, over the stages, which follow each other. reduced:
    received by a rank in the reduction of partial results within a row of the grid, mean. received: in all.
    """
    parts = ranks // copies
    stages = parts // copies
    # By row of the grid and part: an adjacency row that several minibatches want is sent once, but the
    # products have it several times.
    words, made = np.zeros((parts, parts)), np.zeros((parts, parts))
    layers = len(minibatches[0].frontiers)
    marks = np.zeros(len(owners), np.bool_)
    for row in range(parts):
        block = minibatches[row * copies : (row + 1) * copies]
        for layer in range(layers):
            marks[:] = False
            for minibatch in block:
                nodes = minibatch.nodes[: minibatch.frontiers[layer]]
                made[row] += np.bincount(owners[nodes], in_degrees[nodes], parts)
                marks[nodes] = True
            nodes = np.flatnonzero(marks)
            words[row] += np.bincount(owners[nodes], in_degrees[nodes], parts)
    sent = words - np.diag(np.diag(words))
    in_stages = float(sent.sum(axis=0).reshape(copies, stages).max(axis=0).sum())
    partial = made.reshape(parts, copies, stages).sum(axis=2)  # of rank (row, column)
    reduced = float((partial.sum(axis=1, keepdims=True) - partial).mean())
    kbd = float(made.sum())
    law = kbd * (1 / copies + copies / ranks)
    return {
        "P": ranks,
        "c": copies,
        "harmonic mean of P/c and c": 2 / (copies / ranks + 1 / copies),
        "law": law,
        "kbd / c": kbd / copies,
        "stages": in_stages,
        "c kbd / P": kbd * copies / ranks,
        "reduced": reduced,
        "counted": in_stages + reduced,
        "counted / law": (in_stages + reduced) / law,
        "received": float(sent.sum() / ranks) + reduced,
    }


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
        return int(np.count_nonzero(np.bincount(positions[rows] // ROWS_PER_PAGE)))


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


def cooperation(args: argparse.Namespace, figures: Figures) -> None:
    panels: dict[str, list[Curve]] = {}
    for name in args.graphs:
        case = Case(name, args)
        print(f"\n## {name}: {case.node_count:,} nodes, {case.graph.num_edges:,} edges")
        for kind, make in SAMPLERS.items():
            rows, alone = count_rows(case, make(args.fanouts))
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
            for row in rows:
                name = f"{title}, {row['P']} ranks: rows of a cooperative rank over an independent one"
                figures.add(name, row["ratio"], "x")
            square = [ranks for ranks in args.ranks if ranks >= 4 and ranks**0.5 % 1 == 0]
            replicas = [row for ranks in square for row in count_replicas(case, alone[:ranks])]
            figures.table(f"{title}: 1.5D, per rank and minibatch", replicas)
            words = [
                replicate(alone[:ranks], case.owners("hash", ranks // c), case.in_degrees, ranks, c)
                for ranks in square
                for c in grid_sizes(ranks)
                if c**2 <= ranks
            ]
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
    script.run(cooperation)
