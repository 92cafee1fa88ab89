"""How fast does gids sample neighborhoods, compared with DGL, and with times?

    python bench/sampling.py            # compared with DGL: 16 M edges, five minutes
    python bench/sampling.py --log2-nodes 17,20,23  # graphs of several sizes
    python bench/sampling.py --temporal # temporal and disjoint neighbors compared with uniform ones
    python bench/sampling.py --bulk 16  # many minibatches in one call compared with one in each
    python bench/sampling.py --small    # seconds; only shows that it works

DGL: an R-MAT graph (a = 0.57, shuffled ids, int64), in memory, the same for all sides, with the same seeds
and fanouts. Baseline: the faster of DGL's NeighborSampler in its default form (fused with more than one
thread) and not fused. LABOR is compared with LaborSampler; DGL has no LADIES, and its walks are not compared.
All sides have the same number of threads and run in alternating order; results are medians over the rounds.

Temporal: Neighbor with times compared with plain Neighbor on the same graph, by CPU time.
Times of edges or of nodes, and of seeds, are uniform, so half the edges are too late on average; first it
checks that none of these is sampled. "disjoint": trees without times.

Bulk: the same minibatches, bit for bit, by sample_bulk and by single calls. With --dataset the graph is that
of a homogeneous dataset.

Every edge of some minibatches is compared with the graph first. Input nodes are unique. `bench/gpu.py
sampling` measures a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from graphs import graph_of, rmat
from harness import Figures, Script, alternate, integers

from gids.bench.sampling import SAMPLERS, make_sampler
from gids.loader.sampling import sample_steps
from gids.sampler import (
    Block,
    Minibatch,
    Neighbor,
    Sampler,
    TimedSeeds,
    Topology,
    sort_by_time,
)
from gids.sampler.forest import AnySeeds
from gids.store import FeatureStore, Graph

BAR = 1.5
TEMPORAL_BAR = 0.5
TIMES = 1 << 30
Rate = tuple[float, float]  # input nodes and edges per second


def make_graph(args: argparse.Namespace) -> Graph:
    if args.dataset is not None:
        return FeatureStore(args.dataset).graph()
    [log2_nodes] = args.log2_nodes
    indptr, indices = rmat(log2_nodes, args.degree, np.random.default_rng(args.seed))
    return graph_of(indptr, indices.astype(np.int64))


def make_seeds(args: argparse.Namespace, graph: Graph) -> list[torch.Tensor]:
    order = np.random.default_rng(args.seed + 1).permutation(graph.num_dst)
    taken = np.take(order, range(args.batches * args.batch_size), mode="wrap")
    return list(torch.from_numpy(taken).split(args.batch_size))


def counts(minibatch: Minibatch) -> tuple[int, int]:
    """(input nodes, edges) of all layers of a minibatch of one node type."""
    return len(minibatch.input_nodes), sum(block.num_edges for block in blocks_of(minibatch))


def blocks_of(minibatch: Minibatch) -> list[Block]:
    return [block for block in minibatch.blocks if isinstance(block, Block)]


def verify(minibatch: Minibatch) -> None:
    """Check that every edge is in the graph (except edges of walks), and that no edge or node repeats.

    Of one node type. Raises AssertionError.
    """
    assert isinstance(minibatch.input_nodes, torch.Tensor)
    nodes = minibatch.input_nodes.numpy()
    assert len(np.unique(nodes)) == len(nodes), "a node twice"
    for block in blocks_of(minibatch):
        graph, positions = block.graph, block.positions.numpy()
        if not (positions >= 0).any():
            continue  # the edges of random walks are not in the graph
        src, dst = (nodes[ends.numpy()] for ends in block.coo())
        assert np.array_equal(graph.indices[positions], src), "an edge that is not in the graph"
        inside = (graph.indptr[dst] <= positions) & (positions < graph.indptr[dst + 1])
        assert inside.all(), "an edge that is not in the graph"
        assert len(np.unique(positions)) == len(positions), "an edge twice"


def check(graph: Graph, minibatch: Minibatch, fanouts: list[int]) -> None:
    """Check the edges and nodes, and the number of edges per destination.

    LABOR-0 may sample any number up to the degree; its weights are compared with the expected ones.
    """
    verify(minibatch)
    assert isinstance(minibatch.input_nodes, torch.Tensor)
    nodes = minibatch.input_nodes.numpy()
    for block, fanout in zip(minibatch.blocks, fanouts, strict=True):
        assert isinstance(block, Block)
        degrees = np.diff(graph.indptr)[nodes[: block.num_dst]]
        wanted = np.minimum(degrees, fanout)
        if block.weights is None:
            assert np.array_equal(block.indptr.diff().numpy(), wanted)
        else:
            expected = (degrees / np.maximum(wanted, 1))[block.coo()[1].numpy()]
            assert np.allclose(block.weights.numpy(), expected)
            assert (block.indptr.diff().numpy() <= degrees).all()


def timed(
    sample: Callable[[int, Any], tuple[int, int]],
    seeds: Sequence[AnySeeds],
    clock: Callable[[], float] = time.perf_counter,
) -> Rate:
    begun = clock()
    sizes = [sample(step, ids) for step, ids in enumerate(seeds)]
    seconds = clock() - begun
    return sum(nodes for nodes, _ in sizes) / seconds, sum(edges for _, edges in sizes) / seconds


def by_gids(topology: Topology, sampler: Sampler) -> Callable[[int, Any], tuple[int, int]]:
    return lambda step, ids: counts(sampler.sample(topology, ids, step=step, seed=0))


def by_dgl(graph: Any, sampler: Any) -> Callable[[int, Any], tuple[int, int]]:
    def sample(step: int, ids: torch.Tensor) -> tuple[int, int]:
        nodes, _, blocks = sampler.sample(graph, ids)
        return len(nodes), sum(block.num_edges() for block in blocks)

    return sample


def run_sides(
    figures: Figures,
    name: str,
    sides: dict[str, Callable[[], Rate]],
    rounds: int,
    ratios: list[tuple[str, str]],
    bar: float | None,
) -> None:
    """Add what each side samples, and the edges/s of one side over another, for the pairs of `ratios`."""
    for side in sides.values():
        side()  # memory that all of them use again
    rates = alternate(sides, rounds)
    for side, measured in rates.items():
        nodes, edges = (median(rate[i] for rate in measured) / 1e6 for i in (0, 1))
        figures.add(f"{name}, {side}", edges, "M edges/s", note=f"{nodes:.2f} M input nodes/s")
    for side, other in ratios:
        for unit, target in (("edges/s", bar), ("input nodes/s", None)):
            ours, theirs = ([rate[unit == "edges/s"] for rate in rates[s]] for s in (side, other))
            figures.ratio(f"{name}, {side} over {other}, {unit}", ours, theirs, bar=target)


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def compare_sizes(args: argparse.Namespace, figures: Figures) -> None:
    for log2_nodes in args.log2_nodes:
        options = argparse.Namespace(**{**vars(args), "log2_nodes": [log2_nodes]})
        compare_with_dgl(options, figures, f"2^{log2_nodes} nodes, " if len(args.log2_nodes) > 1 else "")


def compare_with_dgl(args: argparse.Namespace, figures: Figures, prefix: str) -> None:
    import gids.dgl  # noqa: F401  # isort: skip  # before dgl: makes it importable beside a current torch
    import dgl

    graph = make_graph(args)
    seeds = make_seeds(args, graph)
    arrays = (torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), [])
    dgl_graph = dgl.graph(("csc", arrays), num_nodes=graph.num_dst).formats("csc")
    topology, loading = Topology(graph), dgl.dataloading
    for kind, threads in itertools.product(args.samplers, args.threads):
        torch.set_num_threads(threads)
        sampler = make_sampler(kind, args.fanouts, args.batch_size, threads=threads)
        peers: dict[str, Any] = {}
        if kind == "neighbor":
            peers["dgl"] = loading.NeighborSampler(args.fanouts)
            peers["dgl, not fused"] = loading.NeighborSampler(args.fanouts, fused=False)
        elif kind.startswith("labor"):
            rounds = {"labor": 0, "labor-1": 1, "labor-star": -1}[kind]
            peers["dgl"] = loading.LaborSampler(args.fanouts, importance_sampling=rounds)
        for step in range(2):
            minibatch = sampler.sample(topology, seeds[step], step=step, seed=0)
            if kind in ("neighbor", "labor"):
                check(graph, minibatch, args.fanouts)
            elif kind != "walk":  # whose edges are not the graph's
                verify(minibatch)
        sides = {"gids": partial(timed, by_gids(topology, sampler), seeds)}
        sides |= {name: partial(timed, by_dgl(dgl_graph, peer), seeds) for name, peer in peers.items()}
        name = f"{prefix}{kind}, {threads_text(threads)}"
        run_sides(figures, name, sides, args.rounds, [("gids", peer) for peer in peers], BAR)


def check_times(graph: Graph, sampler: Neighbor, given: TimedSeeds) -> None:
    minibatch = sampler.sample(graph, given, seed=0)
    assert isinstance(minibatch.batch, torch.Tensor)
    assert isinstance(given.times, torch.Tensor)
    for block in minibatch.blocks:
        assert isinstance(block, Block)
        if sampler.temporal == "edges":
            assert graph.edge_times is not None
            times = graph.edge_times[block.positions.numpy()]
        else:
            assert graph.src_times is not None
            times = graph.src_times[graph.indices[block.positions.numpy()]]
        assert (times <= given.times[minibatch.batch[block.coo()[1]]].numpy()).all()


def compare_temporal(args: argparse.Namespace, figures: Figures) -> None:
    rng = np.random.default_rng(args.seed + 2)
    plain = make_graph(args)
    dates = partial(rng.integers, 0, TIMES, dtype=np.int32)  # as `gids convert` stores such times
    dated_edges = sort_by_time(replace(plain, edge_times=dates(plain.num_edges)), "edges")
    dated_nodes = sort_by_time(replace(plain, src_times=dates(plain.num_src)), "nodes")
    seeds = make_seeds(args, plain)
    timed_seeds = [TimedSeeds(ids, torch.from_numpy(rng.integers(0, TIMES, len(ids)))) for ids in seeds]
    for threads in args.threads:
        make = partial(Neighbor, args.fanouts, threads=threads)
        kinds: dict[str, tuple[Graph, Neighbor, Sequence[AnySeeds]]] = {
            "uniform": (plain, make(), seeds),
            "disjoint": (plain, make(disjoint=True), seeds),
            "edges": (dated_edges, make(temporal="edges"), timed_seeds),
            "edges, last": (dated_edges, make(temporal="edges", strategy="last"), timed_seeds),
            "nodes": (dated_nodes, make(temporal="nodes"), timed_seeds),
            "nodes, last": (dated_nodes, make(temporal="nodes", strategy="last"), timed_seeds),
        }
        for graph, sampler, _ in kinds.values():
            if sampler.temporal is not None:
                check_times(graph, sampler, timed_seeds[0])
        sides = {
            kind: partial(timed, by_gids(Topology(graph), sampler), batches, time.process_time)
            for kind, (graph, sampler, batches) in kinds.items()
        }
        ratios = [(kind, "uniform") for kind in kinds if kind != "uniform"]
        run_sides(figures, f"temporal, {threads_text(threads)}", sides, args.rounds, ratios, TEMPORAL_BAR)


def compare_bulk(args: argparse.Namespace, figures: Figures) -> None:
    graph = make_graph(args)
    seeds, topology = make_seeds(args, graph), Topology(graph)
    groups = [seeds[first : first + args.bulk] for first in range(0, len(seeds), args.bulk)]
    for kind, threads in itertools.product(args.samplers, args.threads):
        sampler = make_sampler(kind, args.fanouts, args.batch_size, threads=threads)

        def bulk(number: int, group: list[torch.Tensor], sampler: Sampler = sampler) -> list[Minibatch]:
            first = number * args.bulk
            return sample_steps(sampler, topology, group, seed=0, epoch=0, first_step=first)

        def sample(number: int, group: list[torch.Tensor], bulk: Any = bulk) -> tuple[int, int]:
            nodes, edges = zip(*map(counts, bulk(number, group)), strict=True)
            return sum(nodes), sum(edges)

        for step, minibatch in enumerate(bulk(0, groups[0])):
            single = sampler.sample(topology, seeds[step], step=step, seed=0)
            verify(minibatch)
            assert torch.equal(minibatch.input_nodes, single.input_nodes), "other nodes than in a single call"
        together = f"{args.bulk} in a call"
        sides = {
            together: partial(timed, sample, groups),
            "1 in a call": partial(timed, by_gids(topology, sampler), seeds),
        }
        name = f"{kind}, {threads_text(threads)}"
        run_sides(figures, name, sides, args.rounds, [(together, "1 in a call")], None)


def sampling(args: argparse.Namespace, figures: Figures) -> None:
    args.threads = args.threads or sorted({1, torch.get_num_threads()})
    compare = compare_temporal if args.temporal else compare_bulk if args.bulk else compare_sizes
    compare(args, figures)


if __name__ == "__main__":
    script = Script(__doc__, "seed")
    option = script.option
    option("log2-nodes", [20], "sizes of the graphs; only DGL is compared on several", small=[12])
    option("degree", 16)
    option("fanouts", [5, 10, 15])
    option("batch-size", 1024, small=64)
    option("batches", 40, "minibatches per round", small=3)
    option("rounds", 9, small=2)
    option("threads", text="numbers of threads (default: 1 and torch's)", type=integers)
    option("samplers", ["neighbor", "labor"], choices=SAMPLERS)
    text = "compare so many minibatches in one call with one in each"
    option("bulk", 0, text, metavar="N")
    option("dataset", text="sample the graph of a dataset, in place of R-MAT", type=Path, metavar="DATASET")
    option("temporal", text="compare temporal with uniform neighbors", action="store_true")
    script.run(sampling)
