"""The obvious model of disjoint and temporal sampling: (tree, node) pairs in a dictionary, edge by edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from sampling_model import Model, Node, Taken, choose, layer_key, philox, words

from gids.sampler import TimedSeeds
from gids.store import Graph

TREE = 0x74726565
Seed = tuple[int, int]  # node, time


def tag(ntype: int, root: int, time: int) -> int:
    return philox((*words(root), *words(time & (1 << 64) - 1)), (ntype, TREE))[0]


def time_at(graph: Graph, by: str | None, position: int) -> int | None:
    if by == "edges" and graph.edge_times is not None:
        return int(graph.edge_times[position])
    if by == "nodes" and graph.src_times is not None:
        return int(graph.src_times[graph.indices[position]])
    return None


def candidates(graph: Graph, node: int, by: str | None, latest: int) -> list[int]:
    """Positions of the in-edges that are not too late."""
    found = []
    for position in range(int(graph.indptr[node]), int(graph.indptr[node + 1])):
        time = time_at(graph, by, position)
        if time is None or time <= latest:
            found.append(position)
    return found


def is_timed(graph: Graph, by: str | None) -> bool:
    return (graph.edge_times if by == "edges" else graph.src_times if by == "nodes" else None) is not None


def sample_trees(
    graphs: Sequence[Graph],
    seeds: dict[str, list[Seed]],
    fanouts: Sequence[Sequence[int]],
    numbers: tuple[int, int, int],
    *,
    by: str | None = None,
    last: bool = False,
    induced: bool = False,
) -> Model:
    """Uniform draws without replacement. by: "edges", "nodes" or None; then times do not bound."""
    roots = [(t, *seed) for t in Model(graphs, {}).types for seed in seeds.get(t, [])]
    types, times = Model(graphs, {}).types, [time for _, _, time in roots]
    tags = [tag(types.index(t), node, time) for t, node, time in roots]
    planted: dict[str, list[Node]] = {t: [] for t in types}
    for tree, (t, node, _) in enumerate(roots):
        planted[t].append((tree, node))
    model = Model(graphs, planted)

    def take(graph: Graph, relation: int, nodes: list[Node], layer: int, fanout: int) -> Taken:
        key, taken = layer_key(*numbers, layer, relation), []
        for tree, node in nodes:
            early = candidates(graph, node, by, times[tree])
            if last and fanout != -1 and is_timed(graph, by):
                early = early[max(0, len(early) - fanout) :]
            drawn = choose(len(early), fanout, key, node | tags[tree] << 32)
            taken.append([(early[i], 1.0) for i in drawn])
        return taken

    for layer, of_layer in enumerate(fanouts):
        model.add_layer(lambda graph, r, nodes: take(graph, r, nodes, layer, of_layer[r]))  # noqa: B023
    if induced:
        model.layers.clear()
        model.add_layer(lambda graph, r, nodes: take(graph, r, nodes, 0, -1), new_nodes=False)
    return model


def with_times(
    graph: Graph, by: str, rng: np.random.Generator, *, dtype: type = np.int64, most: int = 50
) -> Graph:
    """The graph with random times, and edges in their order. Many are equal."""
    if by == "edges":
        times = rng.integers(-3, most, graph.num_edges)
        for v in range(graph.num_dst):
            times[graph.indptr[v] : graph.indptr[v + 1]].sort()
        return replace(graph, edge_times=times.astype(dtype), sorted_by="edges")
    times = rng.integers(-3, most, graph.num_src).astype(dtype)
    indices = graph.indices.copy()
    for v in range(graph.num_dst):
        part = indices[graph.indptr[v] : graph.indptr[v + 1]]
        part[:] = part[np.argsort(times[part], kind="stable")]
    return replace(graph, indices=indices, src_times=times, sorted_by="nodes")


def some_seeds(rng: np.random.Generator, nodes: int, count: int) -> TimedSeeds:
    """Random nodes, some of them repeated, and random times for them."""
    return TimedSeeds(
        torch.from_numpy(rng.integers(0, nodes, count)), torch.from_numpy(rng.integers(0, 50, count))
    )
