"""A simple model of heat: one dense matrix over all nodes of all types."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gids import FeatureStore
from gids.write import DatasetWriter, edge_list

Edges = dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]  # relation -> sources, destinations
Counts = dict[str, int]


def random_graph(seed: int, *, heterogeneous: bool) -> tuple[Counts, Edges]:
    """Some nodes have no edges, some none inwards; edges may repeat and may be loops."""
    rng = np.random.default_rng(seed)
    if not heterogeneous:
        return {"_N": 40}, {("_N", "_E", "_N"): (rng.integers(0, 35, 120), rng.integers(5, 30, 120))}
    counts = {"paper": 30, "author": 20, "venue": 4}
    relations = [
        ("author", "writes", "paper"),
        ("paper", "cites", "paper"),
        ("venue", "prints", "paper"),
        ("paper", "by", "author"),
    ]
    edges = {}
    for relation in relations:
        many = int(rng.integers(30, 90))
        sources = rng.integers(0, counts[relation[0]] - 1, many)  # the last of each type has no out-edge
        edges[relation] = sources, rng.integers(2, counts[relation[2]], many)
    return counts, edges


def write(path: Path, counts: Counts, edges: Edges) -> FeatureStore:
    with DatasetWriter(path) as writer:
        for ntype, count in counts.items():
            writer.add_nodes(ntype, count)
        for relation, (sources, destinations) in edges.items():
            numbers = {"num_src": counts[relation[0]], "num_dst": counts[relation[2]]}
            index_dtype = "int32" if relation[1] == "cites" else "int64"
            writer.write_edges(relation, edge_list(sources, destinations, **numbers), index_dtype=index_dtype)
    return FeatureStore(path)


class Dense:
    """matrix(fanout)[i, j]: how often j draws i; columns are split evenly over relations if `one_way`."""

    def __init__(self, counts: Counts, edges: Edges) -> None:
        self.counts, self.edges = counts, edges
        ends = np.cumsum([0, *counts.values()])
        self.first = dict(zip(counts, ends, strict=False))
        self.nodes = int(ends[-1])

    def matrix(self, fanout: int, *, one_way: bool = False) -> np.ndarray:
        parts = []
        for (source, _, destination), (sources, destinations) in self.edges.items():
            adjacency = np.zeros((self.nodes, self.nodes))
            for s, d in zip(sources, destinations, strict=True):
                adjacency[self.first[source] + s, self.first[destination] + d] += 1
            degrees = adjacency.sum(axis=0)
            drawn = degrees if fanout == -1 else np.minimum(degrees, fanout)
            parts.append(adjacency * drawn / np.maximum(degrees, 1))
        ways = sum((part.sum(axis=0) > 0).astype(float) for part in parts)
        return sum(parts) / (np.maximum(ways, 1) if one_way else 1)

    def vector(self, values: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([values[ntype] for ntype in self.counts])

    def seeded(self, seeds: dict[str, np.ndarray]) -> np.ndarray:
        vector = np.zeros(self.nodes)
        for ntype, ids in seeds.items():
            vector[self.first[ntype] + ids] = 1
        return vector

    def reachable(self, start: int, hops: int) -> np.ndarray:
        """bool[nodes]: the nodes that sampling all neighbors finds from one node."""
        found = np.zeros(self.nodes)
        found[start] = 1
        for _ in range(hops):
            found = found + self.matrix(-1) @ found
        return found > 0
