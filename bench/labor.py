"""How many nodes and edges does each sampler draw, how fast, and how well does GraphSAGE learn with them?

    python bench/labor.py --json bench/results/papers-labor.json --plot docs/papers-labor.png
    python bench/labor.py --bulk 16   # accuracy only, beside that of minibatches sampled 16 at a time
    python bench/labor.py --small   # seconds; only shows that it works

The table and the curves of Balin and Catalyurek, "Layer-Neighbor Sampling" (LABOR), NeurIPS 2023. Two
synthetic graphs with 40 classes; GraphSAGE with three layers, in memory, one thread. In each layer LADIES and
PLADIES draw as many sources as LABOR-* adds nodes on average; LADIES draws without replacement, as published.
Curves show the loss since the point before and the accuracy, by the input nodes and by the edges of all
minibatches so far. Accuracy is measured with all neighbors, in the table on test nodes, in the curves on
validation nodes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from harness import Figures, Script
from learning import Task, hard

from gids.bench.plot import Curve, plot_curves
from gids.sampler import Labor, Ladies, Neighbor, RandomWalk, Sampler

Make = Callable[[], Sampler]
Row = dict[str, Any]
AXES = ("sampled so far (millions)", "")
GRAPHS = {"dense": (20_000, 100.0), "sparse": (100_000, 15.0)}
"""Nodes and mean in-degree."""


def samplers(task: Task, args: argparse.Namespace) -> Iterator[tuple[str, Make]]:
    """By name; LADIES and PLADIES with as many nodes as LABOR-*."""
    fanouts = args.fanouts
    best = partial(Labor, fanouts, importance_sampling=-1, threads=1)
    drawn = []
    for minibatch in islice(task.minibatches(best(), args.batch_size, args.seed), 3):
        counts = [*(block.num_dst for block in minibatch.blocks[::-1]), len(minibatch.input_nodes)]
        drawn.append(np.diff(counts))
    sizes = [max(1, int(size)) for size in np.mean(drawn, axis=0)[::-1]]  # the input layer's first
    yield "Neighbor", partial(Neighbor, fanouts, threads=1)
    yield "LABOR-0", partial(Labor, fanouts, threads=1)
    yield "LABOR-1", partial(Labor, fanouts, importance_sampling=1, threads=1)
    yield "LABOR-*", best
    yield "LADIES", partial(Ladies, sizes, replace=False, threads=1)
    yield "PLADIES", partial(Ladies, sizes, poisson=True, threads=1)
    yield "RandomWalk", partial(RandomWalk, fanouts, threads=1)


def sampled_per_s(task: Task, sampler: Sampler, args: argparse.Namespace) -> float:
    """Minibatches per second, of some."""
    minibatches = task.minibatches(sampler, args.batch_size, args.seed + 1)
    next(minibatches)
    count = min(args.steps, 10)
    begun = time.perf_counter()
    for _ in islice(minibatches, count):
        pass
    return count / (time.perf_counter() - begun)


def learn(task: Task, name: str, sampler: Sampler, args: argparse.Namespace) -> tuple[Row, list[Row]]:
    """The row of the table, and the points of the curve: nodes and edges so far, in thousands."""
    steps, curve, layers = [], [], len(args.fanouts)
    points = list(task.curve(sampler, args))
    for point, new, _ in points:
        steps += new
        sampled = {
            "input nodes": sum(s.nodes[-1] for s in steps) / 1000,
            "edges": sum(sum(s.edges) for s in steps) / 1000,
        }
        curve.append({"sampler": name, "minibatches": point["minibatches"]} | sampled | point)
    nodes, edges = (np.mean([getattr(s, kind) for s in steps], axis=0) / 1000 for kind in ("nodes", "edges"))
    row: Row = {"sampler": name}
    for layer in range(layers, 0, -1):
        row |= {f"nodes {layer}": float(nodes[layer]), f"edges {layer}": float(edges[layer - 1])}
    row["minibatches/s"] = sampled_per_s(task, sampler, args)
    row["accuracy"] = task.accuracy(points[-1][2], "test")
    return row, curve


def compare_bulk(graph: str, task: Task, args: argparse.Namespace, figures: Figures) -> None:
    """Accuracy of each sampler, with one minibatch in a call, and with several."""
    for name, make in samplers(task, args):
        steps = []
        for bulk in (1, args.bulk):
            run = list(task.train(make(), args, bulk))
            steps.append([step for step, _ in run])
            said = f", {bulk} in bulk" if bulk > 1 else ""
            figures.add(f"{graph}, {name}: accuracy{said}", task.accuracy(run[-1][1], "test"), "%")
        assert steps[0] == steps[1], "the minibatches or their losses differ"


def panels_of(graph: str, curves: Mapping[str, Sequence[Row]]) -> dict[str, list[Curve]]:
    """For plot_curves. curves: points by sampler."""
    return {
        f"{graph}, by {kind}: {title}": [
            (name, [p[kind] / 1000 for p in curve], [p[key] for p in curve]) for name, curve in curves.items()
        ]
        for kind in ("input nodes", "edges")
        for key, title in (("loss", "loss"), ("accuracy", "accuracy on validation nodes (%)"))
    }


def labor(args: argparse.Namespace, figures: Figures) -> None:
    torch.set_num_threads(1)
    panels: dict[str, list[Curve]] = {}
    for graph in args.graphs:
        nodes, degree = GRAPHS[graph]
        task = Task(hard(nodes // args.shrink, min(degree, nodes / args.shrink / 2)))
        if args.bulk:
            compare_bulk(graph, task, args, figures)
            continue
        title = f"{graph}: {task.graph.num_dst:,} nodes, {task.graph.num_edges:,} edges"
        rows, curves = {}, {}
        for name, make in samplers(task, args):
            rows[name], curves[name] = learn(task, name, make(), args)
            print(name, rows[name], flush=True)
        figures.table(f"{title}; thousands of nodes and edges by layer", list(rows.values()))
        figures.table(f"{graph}: curves", [point for curve in curves.values() for point in curve])
        layers = range(1, len(args.fanouts) + 1)
        most, least = rows["Neighbor"], rows["LABOR-*"]
        inputs = most[f"nodes {len(layers)}"] / least[f"nodes {len(layers)}"]
        figures.add(f"{graph}: input nodes, Neighbor over LABOR-*", inputs, "x")
        for name in ("LADIES", "PLADIES"):
            fewer = 1 - rows[name][f"nodes {len(layers)}"] / least[f"nodes {len(layers)}"]
            figures.add(f"{graph}: input nodes, {name} less than LABOR-*", 100 * fewer, "%")
        edges, fewest = (sum(row[f"edges {layer}"] for layer in layers) for row in (most, least))
        figures.add(f"{graph}: edges, Neighbor over LABOR-*", edges / fewest, "x")
        accuracy = {name: row["accuracy"] for name, row in rows.items()}
        spread = [accuracy[name] for name in accuracy if name.startswith(("Neighbor", "LABOR"))]
        what = f"{graph}: accuracy, best less worst of Neighbor and LABOR"
        figures.add(what, max(spread) - min(spread), "points")
        gain = accuracy["PLADIES"] - accuracy["LADIES"]
        figures.add(f"{graph}: accuracy, PLADIES less LADIES", gain, "points")
        panels |= panels_of(graph, curves)
    if args.plot:
        plot_curves(args.plot, "Loss and accuracy by what was sampled", panels, AXES, log_x=True)


if __name__ == "__main__":
    script = Script(__doc__, "seed", "plot")
    option = script.option
    option("graphs", list(GRAPHS), choices=list(GRAPHS))
    option("fanouts", [10, 10, 10], small=[4, 4])
    option("batch-size", 256, small=64)
    option("steps", 100, "minibatches of a training", small=4)
    option("every", 10, "minibatches between points of a curve", small=2)
    option("bulk", 0, "compare accuracy with N minibatches in one call", metavar="N")
    option("shrink", 1, "divide the number of nodes by this", small=100)
    script.run(labor)
