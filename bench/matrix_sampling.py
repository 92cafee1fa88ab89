"""Sampling by sparse matrices: does it draw as gids draws, and what does each of its stages cost?

    python bench/matrix_sampling.py --json bench/results/papers-matrices.json
    python bench/matrix_sampling.py --small   # seconds; only shows that it works

matrices.py has the algorithms of Tripathy, Yelick and Buluc. First, many draws on a small graph are compared
with those of gids.sampler.Neighbor and Ladies, by a chi-square test of all edges of two layers. The script
exits with 1 if they differ. Then both sides sample the same seeds of an R-MAT graph without parallel edges,
in memory, with one thread each, in alternating order; times are medians over the rounds. The first
minibatches of both sides are compared with the graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from graphs import graph_of, rmat, seed_order
from harness import Figures, Script, alternate
from matrices import STAGES, Adjacency, Clock, Ints, Layer, Step, graphsage, ladies, rows_of, sample
from sampling import blocks_of, verify
from scipy import sparse, stats

from gids.sampler import Ladies, Minibatch, Neighbor, Sampler, Topology
from gids.store import Graph

LAWS: tuple[Literal["degree", "count"], ...] = ("degree", "count")
OUR_LADIES: Mapping[str, Callable[[Sequence[int]], Sampler]] = {
    law: partial(Ladies, law=law, replace=False, threads=1) for law in LAWS
}
"""Our sampler by the law of matrices.ladies. Each law in this table is compared and timed."""

SIDES = ("matrices", "gids")
UNLIKELY = 1e-4
Row = dict[str, Any]
_RARE = 10  # outcomes that both sides together drew less often are counted as one


@dataclass(frozen=True)
class Pair:
    """A sampler by matrices, and ours.

    sizes: fanouts, or sources, by layer. small_sizes, small_seeds: of the comparison of draws.
    """

    name: str
    by_matrices: Step
    ours: Callable[[Sequence[int]], Sampler]
    sizes: Sequence[int]
    small_sizes: Sequence[int]
    small_seeds: int


def pairs(args: argparse.Namespace) -> Iterator[Pair]:
    yield Pair("GraphSAGE", graphsage, partial(Neighbor, threads=1), args.fanouts, [2, 2], 1)
    for law, ours in OUR_LADIES.items():
        yield Pair(f"LADIES by {law}", partial(ladies, law=law), ours, args.sizes, [2, 2], 2)


def small_graph(seed: int) -> Graph:
    """8 nodes with 3 or 4 in-neighbors, in turn: two layers have a few hundred outcomes."""
    rng = np.random.default_rng([seed, 8])
    degrees = np.tile([3, 4], 4)
    sources = [np.sort(rng.choice(8, degree, replace=False)) for degree in degrees]
    return graph_of(np.concatenate([[0], degrees.cumsum()]), np.concatenate(sources).astype(np.int32))


def drawn_by_matrices(graph: Graph, pair: Pair, args: argparse.Namespace) -> Ints:
    """int64[draws]: the edges of each minibatch as bits; those of layer l begin at l * graph.num_edges."""
    adjacency, rng = Adjacency(graph), np.random.default_rng(args.seed)
    edges = rows_of(adjacency.ones) * graph.num_dst + graph.indices
    seeds = [np.arange(pair.small_seeds)] * args.draws
    drawn = np.zeros(args.draws, np.int64)
    layers, _ = sample(pair.by_matrices, adjacency, seeds, pair.small_sizes, rng, Clock())
    for depth, layer in enumerate(layers):
        minibatch, target = np.divmod(layer.rows[rows_of(layer.matrix)], graph.num_dst)
        source = layer.columns[layer.matrix.indices] % graph.num_dst
        position = np.searchsorted(edges, target * graph.num_dst + source)
        np.add.at(drawn, minibatch, 1 << (position + depth * graph.num_edges))
    return drawn


def drawn_by_gids(graph: Graph, pair: Pair, args: argparse.Namespace) -> Ints:
    """As drawn_by_matrices()."""
    sampler, seeds = pair.ours(pair.small_sizes), torch.arange(pair.small_seeds)
    drawn = []
    for minibatch in sampler.sample_bulk(graph, [seeds] * args.draws, seed=args.seed):
        layers = reversed(blocks_of(minibatch))
        bits = [block.positions.numpy() + depth * graph.num_edges for depth, block in enumerate(layers)]
        drawn.append((1 << np.concatenate(bits)).sum())
    return np.array(drawn)


def p_value(ours: Ints, theirs: Ints) -> float:
    """The probability that samples of one distribution differ as much as these, by chi-square."""
    outcomes, index = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(outcomes)) for part in np.split(index, [len(ours)])]
    rare = counts[0] + counts[1] < _RARE
    table = np.array([[*side[~rare], side[rare].sum()] for side in counts])
    return float(stats.chi2_contingency(table[:, table.any(axis=0)]).pvalue)


def compare_draws(args: argparse.Namespace, figures: Figures) -> bool:
    """Whether both sides draw alike."""
    graph, least = small_graph(args.seed), 1.0
    for pair in pairs(args):
        p = p_value(drawn_by_gids(graph, pair, args), drawn_by_matrices(graph, pair, args))
        note = f"p of chi-square, {args.draws:,} minibatches of each"
        figures.add(f"{pair.name}: matrices draw as gids", p, "", note=note)
        least = min(least, p)
    return least >= UNLIKELY


def without_parallel_edges(indptr: Ints, indices: npt.NDArray[np.integer]) -> Graph:
    size = (len(indptr) - 1,) * 2
    matrix = sparse.csr_array((np.ones(len(indices)), indices, indptr), size)
    matrix.sum_duplicates()
    return graph_of(matrix.indptr.astype(np.int64), matrix.indices)


def check(graph: Graph, layers: Sequence[Layer], pair: Pair) -> None:
    """Compare the edges of some minibatches by matrices with the graph. Raises AssertionError."""
    adjacency, count = Adjacency(graph).ones, graph.num_dst
    for layer, size in zip(layers, reversed(pair.sizes), strict=True):
        targets, sources = layer.rows % count, layer.columns % count
        assert (layer.matrix.data == 1).all(), "an edge twice"
        values = adjacency[targets[rows_of(layer.matrix)], sources[layer.matrix.indices]]
        assert (values == 1).all(), "an edge that is not in the graph"
        if pair.by_matrices is graphsage:
            wanted = np.minimum(np.diff(graph.indptr)[targets], size)
            assert np.array_equal(np.diff(layer.matrix.indptr), wanted), "another number of neighbors"
            continue
        for number in range(layer.rows[-1] // count + 1):
            rows, columns = (keys // count == number for keys in (layer.rows, layer.columns))
            edges = adjacency[targets[rows]]
            assert columns.sum() == min(size, len(np.unique(edges.indices))), "another number of sources"
            assert layer.matrix[rows].nnz == edges[:, sources[columns]].nnz, "an edge is missing"


def compare_times(graph: Graph, pair: Pair, args: argparse.Namespace, figures: Figures) -> list[Row]:
    """The rows of the table, by number of minibatches in bulk."""
    adjacency, topology = Adjacency(graph), Topology(graph)
    sampler, rng = pair.ours(pair.sizes), np.random.default_rng(args.seed)
    order = torch.from_numpy(seed_order(graph, args.seed)[: args.batches * args.batch_size])
    seeds = order.split(args.batch_size)

    def by_matrices(first: int, bulk: int, clock: Clock) -> tuple[list[Layer], int]:
        ids = [part.numpy() for part in seeds[first : first + bulk]]
        layers, input_nodes = sample(pair.by_matrices, adjacency, ids, pair.sizes, rng, clock)
        return layers, len(input_nodes)

    def by_gids(first: int, bulk: int, clock: Clock) -> tuple[list[Minibatch], int]:
        ids = seeds[first : first + bulk]
        minibatches = sampler.sample_bulk(topology, ids, seed=args.seed, first_step=first)
        return minibatches, sum(len(minibatch.input_nodes) for minibatch in minibatches)

    def timed(sample_bulk: Callable[[int, int, Clock], tuple[Any, int]], bulk: int) -> dict[str, float]:
        """Milliseconds and input nodes of a minibatch, and the milliseconds of stages."""
        clock, begun = Clock(), time.perf_counter()
        nodes = sum(sample_bulk(first, bulk, clock)[1] for first in range(0, len(seeds), bulk))
        clock.seconds["all"] = time.perf_counter() - begun
        of_minibatch = {name: 1000 * seconds / len(seeds) for name, seconds in clock.seconds.items()}
        return {**of_minibatch, "input nodes": nodes / len(seeds)}

    check(graph, by_matrices(0, 2, Clock())[0], pair)
    for minibatch in by_gids(0, 2, Clock())[0]:
        verify(minibatch)
    runs = alternate(
        {
            (side, bulk): partial(timed, sample_bulk, bulk)
            for bulk in args.bulks
            for side, sample_bulk in (("matrices", by_matrices), ("gids", by_gids))
        },
        args.rounds,
    )
    times = {side: [run["all"] for run in of_side] for side, of_side in runs.items()}
    rows = []
    for bulk in args.bulks:
        middle = {
            side: {name: median(run[name] for run in runs[side, bulk]) for name in runs[side, bulk][0]}
            for side in SIDES
        }
        rows.append(
            {"sampler": pair.name, "in bulk": bulk}
            | {f"{stage} ms": middle["matrices"][stage] for stage in STAGES}
            | {f"{side} ms": middle[side]["all"] for side in SIDES}
            | {f"input nodes, {side}": middle[side]["input nodes"] for side in SIDES}
        )
        name = f"{pair.name}, {bulk} in bulk: time by matrices over gids"
        figures.ratio(name, times["matrices", bulk], times["gids", bulk])
    least, most = min(args.bulks), max(args.bulks)
    for side in SIDES:
        name = f"{pair.name}, {side}: time of {least} in bulk over {most}"
        figures.ratio(name, times[side, least], times[side, most])
    return rows


def matrix_sampling(args: argparse.Namespace, figures: Figures) -> int:
    torch.set_num_threads(1)
    alike = compare_draws(args, figures)
    graph = without_parallel_edges(*rmat(args.log2_nodes, args.degree, np.random.default_rng(args.seed)))
    rows = [row for pair in pairs(args) for row in compare_times(graph, pair, args, figures)]
    figures.table("milliseconds of a minibatch, by number of minibatches in bulk, one thread", rows)
    return int(not alike)


if __name__ == "__main__":
    script = Script(__doc__, "seed", "rounds")
    option = script.option
    option("draws", 20_000, "minibatches of each side whose draws are compared", small=1_000)
    option("log2-nodes", 17, "size of the graph that is timed", small=10)
    option("degree", 16)
    option("batch-size", 128, small=16)
    option("fanouts", [5, 10], "GraphSAGE: neighbors of a node, by layer", small=[2, 3])
    option("sizes", [512, 512], "LADIES: sources, by layer", small=[32, 32])
    option("batches", 64, "minibatches of a round", small=4)
    option("bulks", [1, 4, 16, 64], "numbers of minibatches in bulk", small=[1, 4])
    script.run(matrix_sampling)
