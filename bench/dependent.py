"""What do dependent and cooperative minibatches save, and do they learn as well as independent ones?

    python bench/dependent.py work       # nodes per seed by batch size, seeds of nodes and of edges
    python bench/dependent.py misses     # misses of LRU caches by kappa and number of ranks
    python bench/dependent.py learning   # loss and accuracy by kappa
    python bench/dependent.py locality   # loss and accuracy with a locality bias
    python bench/dependent.py work --small

Figures 2 to 8 of Balin, LaSalle and Catalyurek, "Cooperative Minibatching in Graph Neural Networks", TMLR
2025.

work, misses: an R-MAT graph (a = 0.57) and a clustered one, shuffled ids; counts, nothing is timed. An edge's
seeds are its ends and the destinations of a random negative. P ranks share a minibatch of P times the seeds
and P caches; misses are those of a rank.
learning, locality: GraphSAGE in memory on a graph with 40 classes, LABOR-0 and Neighbor, one thread. The loss
is the mean since the point before. The bias (Song and Jiang, ICS 2022) favours the fifth of the nodes with
the most out-edges.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from graphs import GRAPHS, make_graph, seed_order
from harness import Figures, integers, make_parser
from learning import Task, hard

from gids import _core
from gids.bench.arguments import kappas
from gids.bench.plot import Curve, plot_curves
from gids.sampler import Labor, LocalityBias, Neighbor, RandomWalk, Sampler, Topology
from gids.store import Graph

Row = dict[str, Any]
SAMPLERS: dict[str, Callable[[list[int]], Sampler]] = {
    "Neighbor": Neighbor,
    "LABOR-0": Labor,
    "LABOR-*": lambda fanouts: Labor(fanouts, importance_sampling=-1),
    "RandomWalk": RandomWalk,
}


def input_nodes(
    sampler: Sampler, topology: Topology, seeds: np.ndarray, step: int, epoch: int = 0
) -> np.ndarray:
    nodes = sampler.sample(topology, torch.from_numpy(seeds), step=step, epoch=epoch).input_nodes
    assert isinstance(nodes, torch.Tensor)
    return nodes.numpy()


def seeds_of_edges(graph: Graph, count: int, rng: np.random.Generator) -> np.ndarray:
    """The ends of `count` random edges, and a random negative destination for each."""
    edges = rng.integers(0, graph.num_edges, count)
    targets = np.searchsorted(graph.indptr, edges, side="right") - 1
    return np.unique(np.concatenate([graph.indices[edges], targets, rng.integers(0, graph.num_dst, count)]))


def work(args: argparse.Namespace, figures: Figures) -> None:
    panels: dict[str, list[Curve]] = {}
    sizes = [args.batch_size << i for i in range(args.doublings)]
    for name in args.graphs:
        graph = make_graph(name, args.log2_nodes, 16, args.seed)
        topology, order, rng = Topology(graph), seed_order(graph, args.seed), np.random.default_rng(args.seed)
        rows: list[Row] = []
        for kind, make in SAMPLERS.items():
            sampler = make(args.fanouts)
            for task in ("nodes", "edges"):
                per_seed = []
                for size in sizes:
                    counts = []
                    for step in range(max(1, min(4, sizes[-1] // size))):
                        drawn = (
                            order[step * size :][:size]
                            if task == "nodes"
                            else seeds_of_edges(graph, size, rng)
                        )
                        counts.append(len(input_nodes(sampler, topology, drawn.astype(np.int64), step)))
                    per_seed.append(float(np.mean(counts)) / size)
                # Theorem 3.1 and 3.2: work is concave, so work per seed never rises, but for noise.
                assert all(b <= 1.02 * a for a, b in pairwise(per_seed)), per_seed
                panels.setdefault(f"{name}, seeds are {task}", []).append((kind, sizes, per_seed))
                saved = per_seed[-1] / per_seed[0]
                figures.add(
                    f"{name}, {kind}, {task}: input nodes per seed, {sizes[-1]} seeds over {sizes[0]}",
                    saved,
                    "x",
                )
                points = dict(zip((f"{size} seeds" for size in sizes), per_seed, strict=True))
                rows.append({"sampler": kind, "seeds are": task} | points)
        figures.table(f"{name}: input nodes per seed", rows)
    if args.plot:
        titles = ("minibatch (seeds)", "input nodes per seed")
        plot_curves(
            args.plot, "Work per seed falls as minibatches grow", panels, titles, log_x=True, log_y=True
        )


def missed(args: argparse.Namespace, graph: Graph, topology: Topology, kappa: float, ranks: int) -> float:
    """The percentage of input nodes that all caches miss, in the second half of the minibatches."""
    sampler = Labor(args.fanouts, batch_dependency=kappa)
    lines = max(1, int(args.cache * graph.num_src)) * ranks
    planner = _core.Planner(graph.num_src, min(lines, graph.num_src), "lru")
    size, order = args.batch_size * ranks, seed_order(graph, args.seed)
    counted = []
    for step in range(args.steps):
        drawn = order.take(range(step * size, (step + 1) * size), mode="wrap")
        if step:
            planner.retire(step - 1)
        nodes = input_nodes(sampler, topology, np.unique(drawn), step)
        planner.enter(step, nodes)
        counted.append((len(nodes) - planner.plan(step)[0], len(nodes)))
    misses, total = np.sum(counted[args.steps // 2 :], axis=0)
    return 100 * float(misses) / float(total)


def misses(args: argparse.Namespace, figures: Figures) -> None:
    panels: dict[str, list[Curve]] = {}
    for name in args.graphs:
        graph = make_graph(name, args.log2_nodes, args.degree, args.seed)
        topology, rows = Topology(graph), []
        for ranks in args.ranks:
            shares = [missed(args, graph, topology, kappa, ranks) for kappa in args.kappas]
            positions = [2 * max(args.kappas[:-1]) if math.isinf(k) else k for k in args.kappas]
            panels.setdefault(f"{name}, LABOR-0", []).append(
                (f"{ranks} rank{'s' * (ranks > 1)}", positions, shares)
            )
            rows.append(
                {"ranks": ranks} | {f"kappa {k:g}, %": s for k, s in zip(args.kappas, shares, strict=True)}
            )
            figures.add(f"{name}, {ranks} ranks: misses, kappa {args.kappas[0]:g}", shares[0], "%")
            figures.add(f"{name}, {ranks} ranks: misses, kappa {args.kappas[-2]:g}", shares[-2], "%")
        figures.table(f"{name}: misses of LRU caches of {args.cache:.0%} of the nodes per rank", rows)
    if args.plot:
        titles = ("kappa (the last point: infinity)", "input nodes missed (%)")
        plot_curves(args.plot, "Misses of LRU caches by kappa and ranks", panels, titles, log_x=True)


def learning(args: argparse.Namespace, figures: Figures) -> None:
    task, learned = Task(hard(args.nodes, 30.0)), Learned(args, figures)
    for kind, make in (("LABOR-0", Labor), ("Neighbor", Neighbor)):
        for kappa in args.kappas:
            name = f"κ = {'∞' if math.isinf(kappa) else f'{kappa:g}'}"
            sampler = make(args.fanouts, batch_dependency=kappa, threads=1)
            learned.add(task, kind, name, f"{kind}, kappa {kappa:g}", sampler)
    learned.show("Learning with dependent minibatches")


def locality(args: argparse.Namespace, figures: Figures) -> None:
    task, learned = Task(hard(args.nodes, 30.0)), Learned(args, figures)
    degrees = torch.from_numpy(np.bincount(task.graph.indices, minlength=task.graph.num_src))
    held = torch.zeros(len(degrees), dtype=torch.bool)
    held[degrees.argsort(descending=True)[: len(degrees) // 5]] = True
    first = 0.0
    for factor in (1, 2, 4, 16):
        sampler = Neighbor(args.fanouts, locality=LocalityBias(held, factor), threads=1)
        outside = [
            int((~held[minibatch.input_nodes]).sum())
            for minibatch in islice(task.minibatches(sampler, args.batch_size, args.seed), 8)
        ]
        first = first or float(np.mean(outside))
        saved = float(np.mean(outside)) / first
        figures.add(f"locality {factor}: input nodes outside over factor 1", saved, "x")
        learned.add(task, "Neighbor", f"factor {factor}", f"locality {factor}", sampler)
    learned.show("Learning with a locality bias")


class Learned:
    """Curves of loss and accuracy, of several trainings."""

    def __init__(self, args: argparse.Namespace, figures: Figures) -> None:
        self._args, self._figures = args, figures
        self._panels: dict[str, list[Curve]] = {}
        self._rows: list[Row] = []

    def add(self, task: Task, kind: str, label: str, name: str, sampler: Sampler) -> None:
        points = list(_points(task, sampler, self._args))
        self._rows += [{"training": name} | point for point in points]
        steps, loss, accuracy = ([p[key] for p in points] for key in ("minibatches", "loss", "accuracy"))
        self._panels.setdefault(f"{kind}: loss", []).append((label, steps, loss))
        self._panels.setdefault(f"{kind}: accuracy on validation nodes (%)", []).append(
            (label, steps, accuracy)
        )
        self._figures.add(f"{name}: accuracy", accuracy[-1], "%")

    def show(self, title: str) -> None:
        self._figures.table("curves", self._rows)
        if self._args.plot:
            plot_curves(self._args.plot, title, self._panels, ("minibatches", ""))


def _points(task: Task, sampler: Sampler, args: argparse.Namespace) -> Iterator[Row]:
    since: list[float] = []
    run = task.train(
        sampler, batch_size=args.batch_size, steps=args.steps, layers=len(args.fanouts), seed=args.seed
    )
    for number, (step, model) in enumerate(run, 1):
        since.append(step.loss)
        if number % args.every == 0:
            yield {
                "minibatches": number,
                "loss": float(np.mean(since)),
                "accuracy": task.accuracy(model, "val"),
            }
            since.clear()


def main() -> None:
    questions = {"work": work, "misses": misses, "learning": learning, "locality": locality}
    parser = make_parser(__doc__, "seed")
    add = parser.add_argument
    add("question", choices=list(questions))
    add("--plot", type=Path, metavar="FILE", help="draw the curves to FILE, as PNG")
    add("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    add("--log2-nodes", type=int, default=20, help="work, misses: size of the graphs (default: 20)")
    add("--degree", type=int, default=32, help="misses: mean in-degree (default: 32)")
    add("--nodes", type=int, default=40_000, help="learning: size of the graph (default: 40000)")
    add("--fanouts", type=integers, default=[10, 10])
    add("--batch-size", type=int, help="seeds; work: the least (default: 64; learning: 256)")
    add("--doublings", type=int, default=11, help="work: number of batch sizes, each twice the one before")
    add("--steps", type=int, help="minibatches (default: 32; learning: 300)")
    add("--every", type=int, default=20, help="learning: minibatches between points (default: 20)")
    add("--kappas", type=kappas, default=[1, 4, 16, 64, 256, math.inf])
    add("--ranks", type=integers, default=[1, 2, 4, 8])
    add("--cache", type=float, default=0.02, help="misses: share of the nodes in a cache (default: 0.02)")
    args = parser.parse_args()
    learns = args.question in ("learning", "locality")
    args.batch_size = args.batch_size or (256 if learns else 64)
    args.steps = args.steps or (300 if learns else 32)
    if args.small:
        args.log2_nodes, args.nodes, args.doublings, args.every = 11, 1000, 3, 2
        args.kappas, args.ranks, args.fanouts = [1, 16, math.inf], [1, 2], [3, 3]
        args.batch_size, args.steps = 16, 4
    torch.set_num_threads(1)
    questions[args.question](args, Figures(args))


if __name__ == "__main__":
    main()
