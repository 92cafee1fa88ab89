"""How fast does gids sample neighborhoods, compared with DGL, and with many minibatches per call?

    python bench/sampling.py            # compared with DGL: 16 M edges, five minutes
    python bench/sampling.py --bulk     # sample_bulk compared with sample
    python bench/sampling.py --temporal # temporal and disjoint neighbors compared with uniform ones
    python bench/sampling.py --small    # seconds; only shows that it works

DGL: an R-MAT graph (a = 0.57, shuffled ids, int64), in memory, the same for all sides, with the same seeds
and fanouts. Baseline: the faster of DGL's NeighborSampler in its default form (fused with more than one
thread) and not fused. Labor (LABOR-0) is compared with the default LaborSampler. All sides have the same
number of threads and run in alternating order; results are medians over the rounds.

Bulk: a window of minibatches of several sizes, by sample() and by sample_bulk(), after all their arrays were
compared; it uses as many free cores as threads.

Temporal: Neighbor with times compared with plain Neighbor on the same graph, by CPU time.
Times of edges or of nodes, and of seeds, are uniform, so half the edges are too late on average; first it
checks that none of these is sampled. "disjoint": trees without times.

Every edge of some minibatches is compared with the graph first. Input nodes are unique. `bench/gpu.py
sampling` measures a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import alternate, integers, make_parser, median_ratio, write_json
from traces import rmat

from gids.bench.minibatches import counts
from gids.bench.sampling import verify
from gids.sampler import (
    Block,
    Labor,
    Ladies,
    Minibatch,
    Neighbor,
    Sampler,
    TimedSeeds,
    Topology,
    sort_by_time,
)
from gids.sampler.forest import AnySeeds
from gids.sampler.layered import LayeredSampler
from gids.store import Graph
from gids.store.names import RELATION

BAR = 1.5
BULK_BAR = 1.3
TEMPORAL_BAR = 0.5
TIMES = 1 << 30
Rate = tuple[float, float]  # input nodes and edges per second


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "json", "seed")
    add = parser.add_argument
    add("--log2-nodes", type=int, default=20, help="size of the graph (default: 20)")
    add("--degree", type=int, default=16)
    add("--fanouts", type=integers, default=[5, 10, 15])
    add("--batch-size", type=int, default=1024)
    add("--batches", type=int, default=40, help="minibatches per round (default: 40)")
    add("--rounds", type=int, default=9)
    add("--threads", type=integers, help="numbers of threads (default: 1 and torch's)")
    add("--samplers", choices=["neighbor", "labor"], nargs="+", default=["neighbor", "labor"])
    add("--temporal", action="store_true", help="compare temporal with uniform neighbors")
    add("--bulk", action="store_true", help="compare sample_bulk with sample")
    add("--window", type=int, default=16, help="minibatches per bulk call (default: 16)")
    add(
        "--bulk-sizes",
        type=integers,
        default=[16, 64, 256, 1024],
        metavar="N,…",
        help="seeds per minibatch in a bulk call (default: 16,64,256,1024)",
    )
    args = parser.parse_args(argv)
    if args.small:
        args.log2_nodes, args.batches, args.rounds, args.batch_size = 12, 3, 2, 64
        args.bulk_sizes = [8, 64]
    return args


def make_graph(args: argparse.Namespace) -> Graph:
    indptr, indices = rmat(args.log2_nodes, args.degree, np.random.default_rng(args.seed))
    nodes = len(indptr) - 1
    return Graph(RELATION, nodes, nodes, indptr, indices.astype(np.int64), None)


def make_seeds(args: argparse.Namespace, graph: Graph) -> list[torch.Tensor]:
    order = np.random.default_rng(args.seed + 1).permutation(graph.num_dst)
    taken = np.take(order, range(args.batches * args.batch_size), mode="wrap")
    return list(torch.from_numpy(taken).split(args.batch_size))


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


def timed(sample: Callable[[int, torch.Tensor], tuple[int, int]], seeds: list[torch.Tensor]) -> Rate:
    begun = time.perf_counter()
    sizes = [sample(step, ids) for step, ids in enumerate(seeds)]
    seconds = time.perf_counter() - begun
    return sum(n for n, _ in sizes) / seconds, sum(e for _, e in sizes) / seconds


def gids_side(topology: Topology, sampler: Sampler, seeds: list[torch.Tensor]) -> Callable[[], Rate]:
    return lambda: timed(lambda step, ids: counts(sampler.sample(topology, ids, step=step)), seeds)


def dgl_side(graph: Any, sampler: Any, seeds: list[torch.Tensor]) -> Callable[[], Rate]:
    def sample(step: int, ids: torch.Tensor) -> tuple[int, int]:
        nodes, _, blocks = sampler.sample(graph, ids)
        return len(nodes), sum(block.num_edges() for block in blocks)

    return lambda: timed(sample, seeds)


def compare_with_dgl(args: argparse.Namespace) -> dict[str, Any]:
    import gids.dgl  # noqa: F401  # isort: skip  # before dgl: makes it importable beside a current torch
    import dgl

    graph = make_graph(args)
    seeds = make_seeds(args, graph)
    arrays = (torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices), [])
    of_dgl = dgl.graph(("csc", arrays), num_nodes=graph.num_dst).formats("csc")
    topology = Topology(graph)
    results: dict[str, Any] = {}
    print(
        f"{graph.num_dst:,} nodes, {graph.num_edges:,} edges, fanouts {args.fanouts}, {args.batch_size} seeds"
    )
    dgl_samplers = dgl.dataloading
    all_threads = args.threads or sorted({1, torch.get_num_threads()})
    for kind, threads in itertools.product(args.samplers, all_threads):
        torch.set_num_threads(threads)
        sampler: Sampler
        if kind == "neighbor":
            sampler = Neighbor(args.fanouts, threads=threads)
            peers = {
                "dgl": dgl_samplers.NeighborSampler(args.fanouts),
                "dgl, not fused": dgl_samplers.NeighborSampler(args.fanouts, fused=False),
            }
        else:
            sampler = Labor(args.fanouts, threads=threads)
            peers = {"dgl": dgl_samplers.LaborSampler(args.fanouts)}
        for step in range(2):
            check(graph, sampler.sample(topology, seeds[step], step=step), args.fanouts)
        sides = {"gids": gids_side(topology, sampler, seeds)}
        sides |= {name: dgl_side(of_dgl, peer, seeds) for name, peer in peers.items()}
        for side in sides.values():
            side()  # memory that all of them use again
        rates = alternate(sides, args.rounds)
        peer = max(peers, key=lambda name: median(n for n, _ in rates[name]))
        ratio = median_ratio([e for _, e in rates["gids"]], [e for _, e in rates[peer]])
        results[f"{kind}, {threads} threads"] = {"rates": rates, "peer": peer, "ratio": ratio}
        print(f"{kind}, {threads} thread{'s' * (threads > 1)}:")
        for name, measured in rates.items():
            nodes, edges = (median(m[i] for m in measured) / 1e6 for i in (0, 1))
            print(f"  {name:16} {nodes:7.2f} M input nodes/s  {edges:7.2f} M edges/s")
        print(f"  {ratio:.2f} x {peer} (target: {BAR})")
    return results


def seconds_of(sample: Callable[[], list[Minibatch]]) -> float:
    """For one call, which may be short."""
    begun, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begun < 0.05:
        sample()
        calls += 1
    return (time.perf_counter() - begun) / calls


def compare_bulk(args: argparse.Namespace) -> dict[str, Any]:
    graph = make_graph(args)
    topology = Topology(graph)
    makers: dict[str, Callable[[int], LayeredSampler]] = {
        "neighbor": lambda threads: Neighbor(args.fanouts, threads=threads),
        "labor": lambda threads: Labor(args.fanouts, threads=threads),
        "ladies": lambda threads: Ladies([512] * len(args.fanouts), threads=threads),
    }
    results: dict[str, Any] = {}
    print(f"{graph.num_dst:,} nodes, {graph.num_edges:,} edges, {args.window} minibatches in a bulk")
    all_threads = args.threads or sorted({1, torch.get_num_threads()})
    for kind, threads, size in itertools.product(makers, all_threads, args.bulk_sizes):
        alone, bulk = makers[kind](threads), makers[kind](threads)
        order = np.random.default_rng(args.seed + 1).permutation(graph.num_dst)
        seeds = list(torch.from_numpy(np.resize(order, args.window * size)).split(size))

        def one_by_one(sampler: LayeredSampler, seeds: list[torch.Tensor]) -> list[Minibatch]:
            return [sampler.sample(topology, ids, step=step) for step, ids in enumerate(seeds)]

        sides = {
            "one by one": partial(one_by_one, alone, seeds),
            "bulk": partial(bulk.sample_bulk, topology, seeds),
        }
        for one, other in zip(*(side() for side in sides.values()), strict=True):
            assert all(map(torch.equal, one.tensors(), other.tensors()))
        times = alternate({name: partial(seconds_of, side) for name, side in sides.items()}, args.rounds)
        ratio = median_ratio(times["one by one"], times["bulk"])
        name = f"{kind}, {threads} thread{'s' * (threads > 1)}, {size} seeds"
        results[name] = {"seconds": times, "ratio": ratio}
        each = ", ".join(f"{median(t) / args.window * 1e6:.0f} us {side}" for side, t in times.items())
        bar = f" (target: {BULK_BAR})" if threads > 1 else ""
        print(f"  {name:28} {each}: {ratio:.2f} x{bar}", flush=True)
    return results


def check_times(graph: Graph, sampler: Neighbor, given: TimedSeeds) -> None:
    minibatch = sampler.sample(graph, given)
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


def compare_temporal(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed + 2)
    plain = make_graph(args)
    dates = partial(rng.integers, 0, TIMES, dtype=np.int32)  # as `gids convert` stores such times
    of_edges = sort_by_time(replace(plain, edge_times=dates(plain.num_edges)), "edges")
    of_nodes = sort_by_time(replace(plain, src_times=dates(plain.num_src)), "nodes")
    seeds = make_seeds(args, plain)
    timed_seeds = [TimedSeeds(ids, torch.from_numpy(rng.integers(0, TIMES, len(ids)))) for ids in seeds]
    results: dict[str, Any] = {}
    print(
        f"{plain.num_dst:,} nodes, {plain.num_edges:,} edges, fanouts {args.fanouts}, {args.batch_size} seeds"
    )
    for threads in args.threads or sorted({1, torch.get_num_threads()}):
        make = partial(Neighbor, args.fanouts, threads=threads)
        kinds: dict[str, tuple[Graph, Neighbor, Sequence[AnySeeds]]] = {
            "uniform": (plain, make(), seeds),
            "disjoint": (plain, make(disjoint=True), seeds),
            "edges": (of_edges, make(temporal="edges"), timed_seeds),
            "edges, last": (of_edges, make(temporal="edges", strategy="last"), timed_seeds),
            "nodes": (of_nodes, make(temporal="nodes"), timed_seeds),
            "nodes, last": (of_nodes, make(temporal="nodes", strategy="last"), timed_seeds),
        }
        for graph, sampler, _ in kinds.values():
            if sampler.temporal is not None:
                check_times(graph, sampler, timed_seeds[0])
        sides = {n: partial(rate_of_cpu_time, Topology(g), s, b) for n, (g, s, b) in kinds.items()}
        for side in sides.values():
            side()  # memory that all of them use again
        rates = alternate(sides, args.rounds)
        print(f"{threads} thread{'s' * (threads > 1)}:")
        for name, measured in rates.items():
            nodes, edges = (
                median_ratio([m[i] for m in measured], [m[i] for m in rates["uniform"]]) for i in (0, 1)
            )
            results[f"{name}, {threads} threads"] = {"rates": measured, "nodes": nodes, "edges": edges}
            of_nodes_s, of_edges_s = (median(m[i] for m in measured) / 1e6 for i in (0, 1))
            bar = f" (target: {TEMPORAL_BAR})" if name != "uniform" else ""
            print(
                f"  {name:12} {of_nodes_s:6.2f} M input nodes/s, {nodes:.2f} x uniform; {of_edges_s:6.2f} M "
                f"edges/s, {edges:.2f} x uniform{bar}"
            )
    return results


def rate_of_cpu_time(topology: Topology, sampler: Neighbor, seeds: Sequence[AnySeeds]) -> Rate:
    begun = time.process_time()
    sizes = [counts(sampler.sample(topology, ids, step=step)) for step, ids in enumerate(seeds)]
    seconds = time.process_time() - begun
    return sum(n for n, _ in sizes) / seconds, sum(e for _, e in sizes) / seconds


def main() -> None:
    args = parse()
    compare = compare_temporal if args.temporal else compare_bulk if args.bulk else compare_with_dgl
    measured = compare(args)
    write_json(args.json, {"arguments": {k: str(v) for k, v in vars(args).items()}, "results": measured})


if __name__ == "__main__":
    main()
