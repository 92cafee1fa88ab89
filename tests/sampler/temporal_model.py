"""The obvious model of disjoint and temporal sampling: (tree, node) pairs in a dictionary, edge by edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sampling_model import ModelBlock, choose, layer_key, philox, words

from gids.sampler import TimedSeeds
from gids.store import Graph

TREE = 0x74726565
Seed = tuple[int, int]  # node, time


def tag(ntype: int, root: int, time: int) -> int:
    return philox((*words(root), *words(time & (1 << 64) - 1)), (ntype, TREE))[0]


@dataclass
class ModelTrees:
    """nodes: by type, (tree, id); layers: blocks by layer, the seeds' first, and relation; roots: by tree."""

    nodes: dict[str, list[tuple[int, int]]]
    layers: list[list[ModelBlock]]
    times: list[int]


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
) -> ModelTrees:
    """Uniform draws without replacement. by: "edges", "nodes" or None; then times do not bound."""
    types = list(dict.fromkeys(t for g in graphs for t in (g.relation[0], g.relation[2])))
    nodes: dict[str, list[tuple[int, int]]] = {t: [] for t in types}
    local: dict[str, dict[tuple[int, int], int]] = {t: {} for t in types}
    tags, times = [], []
    for number, t in enumerate(types):
        for node, time in seeds.get(t, []):
            local[t].setdefault((len(tags), node), len(nodes[t]))
            nodes[t].append((len(tags), node))
            tags.append(tag(number, node, time))
            times.append(time)

    def block_of(
        graph: Graph, frontier: list[tuple[int, int]], taken: list[list[int]], add: bool
    ) -> ModelBlock:
        block, src = ModelBlock([0], [], [], 0), graph.relation[0]
        for (tree, _), positions in zip(frontier, taken, strict=True):
            for position in positions:
                pair = (tree, int(graph.indices[position]))
                if add and pair not in local[src]:
                    local[src][pair] = len(nodes[src])
                    nodes[src].append(pair)
                if pair in local[src]:
                    block.indices.append(local[src][pair])
                    block.positions.append(position)
            block.indptr.append(len(block.indices))
        return block

    layers = []
    for layer, layer_fanouts in enumerate(fanouts):
        before = {t: list(nodes[t]) for t in types}
        blocks = []
        for r, (graph, fanout) in enumerate(zip(graphs, layer_fanouts, strict=True)):
            key = layer_key(*numbers, layer, r)
            frontier = before[graph.relation[2]]
            taken = []
            for tree, node in frontier:
                early = candidates(graph, node, by, times[tree])
                if last and fanout != -1 and is_timed(graph, by):
                    early = early[max(0, len(early) - fanout) :]
                drawn = choose(len(early), fanout, key, node | tags[tree] << 32)
                taken.append([early[i] for i in drawn])
            blocks.append(block_of(graph, frontier, taken, add=True))
        for graph, block in zip(graphs, blocks, strict=True):
            block.num_src = len(nodes[graph.relation[0]])
        layers.append(blocks)
    if induced:
        blocks = []
        for graph in graphs:
            frontier = nodes[graph.relation[2]]
            taken = [candidates(graph, node, by, times[tree]) for tree, node in frontier]
            blocks.append(
                replace(block_of(graph, frontier, taken, add=False), num_src=len(nodes[graph.relation[0]]))
            )
        layers = [blocks]
    return ModelTrees(nodes, layers, times)


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
