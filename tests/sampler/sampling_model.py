"""The obvious model of sampling: random numbers, choice and numbering, one node at a time; and graphs to
sample.

A node is a pair (tree, id); all are in tree 0 if a minibatch has no trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from datasets import in_edges

from gids.sampler import Minibatch
from gids.store import Graph
from gids.store.names import RELATION, Relation

Node = tuple[int, int]
Seed = tuple[int, int]
"""Node and time."""
Taken = list[list[tuple[int, float]]]
"""Of each node: the positions of its edges, and their weights."""
Draw = Callable[[Graph, int, int, int, list[Node]], Taken]
"""(graph, number of its relation, layer, fanout, nodes) -> what they take. Layer 0 is the seeds' layer."""

MASK = (1 << 32) - 1
TREE = 0x74726565


def make_graph(
    degrees: Sequence[int] | np.ndarray,
    *,
    num_src: int | None = None,
    relation: Relation = RELATION,
    dtype: type = np.int64,
    seed: int = 0,
) -> Graph:
    """A graph in memory, with in_edges()."""
    num_src = len(degrees) if num_src is None else num_src
    indptr, indices = in_edges(degrees, num_src, seed)
    return Graph(relation, num_src, len(degrees), indptr, indices.astype(dtype), None)


def distinct_graph(nodes: int, num_src: int, degrees: tuple[int, int], seed: int = 0) -> Graph:
    """A graph from type "a" to type "b" without parallel edges. degrees: the least and the largest."""
    rng = np.random.default_rng(seed)
    least, largest = degrees
    lists = [rng.permutation(num_src)[: rng.integers(least, largest + 1)] for _ in range(nodes)]
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return Graph(("a", "to", "b"), num_src, nodes, indptr, np.concatenate(lists), None)


def philox(counter: Sequence[int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & MASK, a >> 32 ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def words(value: int) -> tuple[int, int]:
    return value & MASK, value >> 32


def halves(out: tuple[int, int, int, int]) -> tuple[int, int]:
    return out[0] | out[1] << 32, out[2] | out[3] << 32


def layer_key(seed: int, epoch: int, step: int, layer: int, relation: int) -> int:
    """The key of one relation in one layer of one minibatch. Layer 0 is the seeds' layer."""
    minibatch = halves(philox((*words(epoch), *words(step)), words(seed)))[0]
    return halves(philox((*words(layer), *words(relation)), words(minibatch)))[0]


def tag(ntype: int, root: int, time: int) -> int:
    """By which the tree of a seed draws."""
    return philox((*words(root), *words(time & (1 << 64) - 1)), (ntype, TREE))[0]


def choose(degree: int, fanout: int, key: int, node: int) -> list[int]:
    """A node's sampled in-edges, in order: Floyd's algorithm."""
    if fanout == -1 or degree <= fanout:
        return list(range(degree))
    chosen: list[int] = []
    for i in range(fanout):
        bits = halves(philox((*words(node), *words(i // 2)), words(key)))[i % 2]
        last = degree - fanout + i
        drawn = bits * (last + 1) >> 64
        chosen.append(last if drawn in chosen else drawn)
    return chosen


def times_of_edges(graph: Graph, by: str | None) -> np.ndarray | None:
    if by == "edges":
        return graph.edge_times
    return graph.src_times[graph.indices] if by == "nodes" and graph.src_times is not None else None


@dataclass
class ModelBlock:
    indptr: list[int] = field(default_factory=lambda: [0])
    indices: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    num_src: int = 0


class Model:
    """nodes: by type. layers: blocks by layer, the seeds' first, and relation."""

    def __init__(self, graphs: Sequence[Graph], seeds: dict[str, list[Node]]) -> None:
        self.graphs, self.layers = graphs, list[list[ModelBlock]]()
        self.types = list(dict.fromkeys(t for g in graphs for t in (g.relation[0], g.relation[2])))
        self.nodes = {t: list(seeds.get(t, [])) for t in self.types}
        self._local: dict[str, dict[Node, int]] = {t: {} for t in self.types}
        for t in self.types:
            for at, node in enumerate(self.nodes[t]):
                self._local[t].setdefault(node, at)

    def run(self, fanouts: Sequence[Sequence[int]], draw: Draw, *, new_nodes: bool = True) -> Model:
        """Sample layers, the seeds' first. Without new nodes, edges from others are left out."""
        for layer, numbers in enumerate(fanouts):
            before = {t: list(nodes) for t, nodes in self.nodes.items()}
            blocks = []
            for r, graph in enumerate(self.graphs):
                src, _, dst = graph.relation
                block, nodes, local = ModelBlock(), self.nodes[src], self._local[src]
                drawn = draw(graph, r, layer, numbers[r], before[dst])
                for (tree, _), taken in zip(before[dst], drawn, strict=True):
                    for position, weight in taken:
                        source = (tree, int(graph.indices[position]))
                        if new_nodes and source not in local:
                            local[source] = len(nodes)
                            nodes.append(source)
                        if source in local:
                            block.indices.append(local[source])
                            block.positions.append(position)
                            block.weights.append(weight)
                    block.indptr.append(len(block.indices))
                blocks.append(block)
            for graph, block in zip(self.graphs, blocks, strict=True):
                block.num_src = len(self.nodes[graph.relation[0]])
            self.layers.append(blocks)
        return self

    def check(self, minibatch: Minibatch, *, weighted: bool = False) -> None:
        """The minibatch is this one, bit by bit but for the last bits of weights, if it has any."""
        both = [(minibatch.input_nodes, 1)] + ([] if minibatch.batch is None else [(minibatch.batch, 0)])
        for by_type, part in both:
            by_type = by_type if isinstance(by_type, dict) else {self.types[0]: by_type}
            expected = {t: [node[part] for node in nodes] for t, nodes in self.nodes.items()}
            assert {t: ids.tolist() for t, ids in by_type.items()} == expected
        assert len(minibatch.blocks) == len(self.layers)
        for layer, models in zip(reversed(minibatch.blocks), self.layers, strict=True):
            if isinstance(layer, dict):
                assert list(layer) == [g.relation for g in self.graphs]
            for block, model in zip(
                layer.values() if isinstance(layer, dict) else [layer], models, strict=True
            ):
                assert {t.dtype for t in (block.indptr, block.indices, block.positions)} == {torch.int64}
                assert block.indptr.tolist() == model.indptr
                assert block.indices.tolist() == model.indices
                assert block.positions.tolist() == model.positions
                sizes = (block.num_src, block.num_dst, block.num_edges)
                assert sizes == (model.num_src, len(model.indptr) - 1, len(model.indices))
                assert (block.weights is not None) == weighted
                if block.weights is not None:
                    assert block.weights.dtype == torch.float32
                    np.testing.assert_allclose(block.weights.numpy(), model.weights, rtol=1e-5)


def sample_neighbors(
    graphs: Sequence[Graph],
    seeds: dict[str, list[Seed]],
    fanouts: Sequence[Sequence[int]],
    numbers: tuple[int, int, int],
    *,
    disjoint: bool = False,
    by: str | None = None,
    last: bool = False,
    induced: bool = False,
) -> Model:
    """Uniform draws without replacement. fanouts: by layer, the seeds' first, and relation. numbers: seed,
    epoch, step. by: whose times bound the edges, "edges" or "nodes" or None."""
    types = Model(graphs, {}).types
    roots = [(t, *seed) for t in types for seed in seeds.get(t, [])]
    tags = [tag(types.index(t), node, time) if disjoint else 0 for t, node, time in roots]
    planted: dict[str, list[Node]] = {t: [] for t in types}
    for tree, (t, node, _) in enumerate(roots):
        planted[t].append((tree if disjoint else 0, node))
    times_of = [times_of_edges(graph, by) for graph in graphs]

    def draw(graph: Graph, relation: int, layer: int, fanout: int, nodes: list[Node]) -> Taken:
        key, times, taken = layer_key(*numbers, layer, relation), times_of[relation], []
        for tree, node in nodes:
            early = list(range(graph.indptr[node], graph.indptr[node + 1]))
            if times is not None:
                early = [position for position in early if times[position] <= roots[tree][2]]
                if last and fanout != -1:
                    early = early[max(0, len(early) - fanout) :]
            drawn = choose(len(early), fanout, key, node | tags[tree] << 32)
            taken.append([(early[i], 1.0) for i in drawn])
        return taken

    model = Model(graphs, planted).run(fanouts, draw)
    if induced:
        model.layers.clear()
        model.run([[-1] * len(graphs)], draw, new_nodes=False)
    return model


def mixed_degrees(nodes: int, seed: int = 0) -> np.ndarray:
    """Degrees of 0, few, about the fanout, and some hubs with many more."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 10, nodes)
    degrees = np.where(kind < 2, 0, rng.integers(1, 25, nodes))
    return np.where(kind == 9, rng.integers(200, 400, nodes), degrees)


def citations(dtype: type = np.int32) -> list[Graph]:
    """Four relations over three types; no relation ends in "venue"."""
    papers, authors, venues = 400, 150, 7
    return [
        make_graph(mixed_degrees(papers, 1), relation=("paper", "cites", "paper"), dtype=dtype, seed=1),
        make_graph(
            mixed_degrees(papers, 2),
            num_src=authors,
            relation=("author", "writes", "paper"),
            dtype=np.int64,
            seed=2,
        ),
        make_graph(
            mixed_degrees(authors, 3), num_src=papers, relation=("paper", "written by", "author"), seed=3
        ),
        make_graph(
            np.ones(papers, int), num_src=venues, relation=("venue", "prints", "paper"), dtype=dtype, seed=4
        ),
    ]


def with_times(graph: Graph, seed: int = 0, *, most: int = 50) -> Graph:
    """The graph with times of nodes and others of edges, and its edges in the order of both. Many are
    equal."""
    times = np.random.default_rng(seed).integers(-3, most, graph.num_src)
    indices = graph.indices.copy()
    for v in range(graph.num_dst):
        part = indices[graph.indptr[v] : graph.indptr[v + 1]]
        part[:] = part[np.argsort(times[part], kind="stable")]
    of_edges = (2 * times[indices] - most // 2).astype(np.int32)
    return replace(graph, indices=indices, src_times=times, edge_times=of_edges)
