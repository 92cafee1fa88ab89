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
is the mean since the point before. kappa counts minibatches over epochs. "Separate" trains on several
minibatches in a step, each of its share of the seeds, with random numbers of its own, as independent ranks
do; otherwise a step has one minibatch, as cooperative ranks have. Accuracy is of all neighbors of validation
nodes; "sampled", of those that the sampler draws next.
The bias (Song and Jiang, ICS 2022) favours the fifth of the nodes with the most out-edges; as published, and
with weights that make it unbiased.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from graphs import GRAPHS, input_nodes, make_graph, seed_order
from harness import Figures, Script
from learning import Task, hard

from gids import _core
from gids.bench.plot import Curve, plot_curves
from gids.cli import arguments
from gids.sampler import Labor, LocalityBias, Neighbor, RandomWalk, Sampler, Topology
from gids.store import Graph

Row = dict[str, Any]
SAMPLERS: dict[str, Callable[[list[int]], Sampler]] = {
    "Neighbor": Neighbor,
    "LABOR-0": Labor,
    "LABOR-*": lambda fanouts: Labor(fanouts, importance_sampling=-1),
    "RandomWalk": RandomWalk,
}


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
                        drawn = order[step * size :][:size]
                        if task == "edges":
                            drawn = seeds_of_edges(graph, size, rng)
                        counts.append(len(input_nodes(sampler, topology, drawn, step=step)))
                    per_seed.append(float(np.mean(counts)) / size)
                # Theorem 3.1 and 3.2: work is concave, so work per seed never rises, but for noise.
                assert all(b <= 1.02 * a for a, b in pairwise(per_seed)), per_seed
                panels.setdefault(f"{name}, seeds are {task}", []).append((kind, sizes, per_seed))
                what = f"input nodes per seed, {sizes[-1]} seeds over {sizes[0]}"
                figures.add(f"{name}, {kind}, {task}: {what}", per_seed[-1] / per_seed[0], "x")
                points = dict(zip((f"{size} seeds" for size in sizes), per_seed, strict=True))
                rows.append({"sampler": kind, "seeds are": task} | points)
        figures.table(f"{name}: input nodes per seed", rows)
    if args.plot:
        titles = ("minibatch (seeds)", "input nodes per seed")
        title = "Work per seed falls as minibatches grow"
        plot_curves(args.plot, title, panels, titles, log_x=True, log_y=True)


def missed(
    args: argparse.Namespace, graph: Graph, topology: Topology, dependency: float, ranks: int
) -> float:
    """The percentage of input nodes that all caches miss, in the second half of the minibatches."""
    sampler = Labor(args.fanouts, batch_dependency=dependency)
    lines = max(1, int(args.cache * graph.num_src)) * ranks
    planner = _core.Planner(graph.num_src, min(lines, graph.num_src), "lru")
    size, order = args.batch_size * ranks, seed_order(graph, args.seed)
    counted = []
    for step in range(args.steps):
        drawn = order.take(range(step * size, (step + 1) * size), mode="wrap")
        if step:
            planner.retire(step - 1)
        nodes = input_nodes(sampler, topology, np.unique(drawn), step=step)
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
            curve = (f"{ranks} rank{'s' * (ranks > 1)}", positions, shares)
            panels.setdefault(f"{name}, LABOR-0", []).append(curve)
            columns = (f"kappa {kappa:g}, %" for kappa in args.kappas)
            rows.append({"ranks": ranks} | dict(zip(columns, shares, strict=True)))
            for i in (0, -2):
                figures.add(f"{name}, {ranks} ranks: misses, kappa {args.kappas[i]:g}", shares[i], "%")
        figures.table(f"{name}: misses of LRU caches of {args.cache:.0%} of the nodes per rank", rows)
    if args.plot:
        titles = ("kappa (the last point: infinity)", "input nodes missed (%)")
        plot_curves(args.plot, "Misses of LRU caches by kappa and ranks", panels, titles, log_x=True)


def learning(args: argparse.Namespace, figures: Figures) -> None:
    trainings, few = [], (args.kappas[0], *args.kappas[-2:])
    separate = f"LABOR-0, {args.separate} separate"
    for kind, make, kappas, parts in (
        ("LABOR-0", Labor, args.kappas, 1),
        (separate, Labor, few, args.separate),
        ("Neighbor", Neighbor, few, 1),
    ):
        for kappa in kappas:
            label = f"κ = {'∞' if math.isinf(kappa) else f'{kappa:g}'}"
            sampler = make(args.fanouts, batch_dependency=kappa, threads=1)
            trainings.append(Trained(kind, label, f"{kind}, kappa {kappa:g}", sampler, parts))
    task = Task(hard(args.nodes, 30.0))
    learn(args, figures, task, trainings, "Learning with dependent minibatches", sampled=True)


def locality(args: argparse.Namespace, figures: Figures) -> None:
    task, trainings = Task(hard(args.nodes, 30.0)), list[Trained]()
    degrees = torch.from_numpy(np.bincount(task.graph.indices, minlength=task.graph.num_src))
    held = torch.zeros(len(degrees), dtype=torch.bool)
    held[degrees.argsort(descending=True)[: len(degrees) // 5]] = True
    first = 0.0
    for factor in (1, 2, 4, 16):
        for weights in (False, True)[: 1 if factor == 1 else 2]:
            bias = LocalityBias(held, factor, weights=weights)
            sampler = Neighbor(args.fanouts, locality=bias, threads=1)
            kind = "unbiased" if factor == 1 else "with weights" if weights else "as published"
            name = f"locality {factor}, {kind}"
            if not weights:  # the nodes are the same with weights
                minibatches = islice(task.minibatches(sampler, args.batch_size, args.seed), 8)
                outside = float(np.mean([int((~held[m.input_nodes]).sum()) for m in minibatches]))
                first = first or outside
                figures.add(f"locality {factor}: input nodes outside over factor 1", outside / first, "x")
            panels = ("as published", "with weights") if factor == 1 else (kind,)
            trainings += [Trained(panel, f"factor {factor}", name, sampler) for panel in panels]
    learn(args, figures, task, trainings, "Learning with a locality bias")


@dataclass(frozen=True)
class Trained:
    """A training. panel, label: of its curves. parts: number of minibatches in a step."""

    panel: str
    label: str
    name: str
    sampler: Sampler
    parts: int = 1


def learn(
    args: argparse.Namespace,
    figures: Figures,
    task: Task,
    trainings: Sequence[Trained],
    title: str,
    *,
    sampled: bool = False,
) -> None:
    """Curves of loss and accuracy; sampled: also of accuracy with sampled neighborhoods. Trainings of one
    name run once."""
    panels: dict[str, list[Curve]] = {}
    rows: list[Row] = []
    points: dict[str, list[dict[str, float]]] = {}
    titles = {"loss": "loss", "accuracy": "accuracy on validation nodes (%)"}
    if sampled:
        titles["accuracy, sampled"] = "accuracy, sampled (%)"
    for one in trainings:
        if one.name not in points:
            curve = task.curve(one.sampler, args, parts=one.parts, sampled=sampled)
            points[one.name] = of_training = [point for point, _, _ in curve]
            rows += [{"training": one.name} | point for point in of_training]
            for what in titles:
                figures.add(f"{one.name}: {what}", of_training[-1][what], "" if what == "loss" else "%")
        steps = [point["minibatches"] for point in points[one.name]]
        for what, said in titles.items():
            values = [point[what] for point in points[one.name]]
            panels.setdefault(f"{one.panel}: {said}", []).append((one.label, steps, values))
    figures.table("curves", rows)
    if args.plot:
        plot_curves(args.plot, title, panels, ("minibatches", ""))


if __name__ == "__main__":
    torch.set_num_threads(1)
    questions = {"work": work, "misses": misses, "learning": learning, "locality": locality}
    script = Script(__doc__, "seed", "plot", questions=questions)
    option = script.option
    option("graphs", list(GRAPHS), choices=GRAPHS)
    option("log2-nodes", 20, "work, misses: size of the graphs", small=11)
    option("degree", 32, "misses: mean in-degree")
    option("nodes", 40_000, "learning: size of the graph", small=1000)
    option("fanouts", [10, 10], small=[3, 3])
    option("batch-size", text="seeds; work: the least (default: 64; learning: 256)", type=int, small=16)
    option("doublings", 11, "work: number of batch sizes, each twice the one before", small=3)
    option("steps", text="minibatches (default: 32; learning: 300)", type=int, small=4)
    option("every", 20, "learning: minibatches between points", small=2)
    option("separate", 4, "learning: minibatches in a step of independent ranks")
    option("kappas", [1, 4, 16, 64, 256, math.inf], type=arguments.kappa, nargs="+", small=[1, 16, math.inf])
    option("ranks", [1, 2, 4, 8], small=[1, 2])
    option("cache", 0.02, "misses: share of the nodes in a cache")
    for question in ("work", "misses"):
        script.defaults(question, batch_size=64, steps=32)
    for question in ("learning", "locality"):
        script.defaults(question, batch_size=256, steps=300)
    script.run()
