"""LADIES: probabilities of sources, weights, every edge from them. Seeds are fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_model import citations, distinct_graph, make_graph, mixed_degrees
from scipy import stats

from gids.sampler import Block, Ladies, Neighbor
from gids.sampler.ladies import Law
from gids.store import Graph

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not


def blocks(sampler: Ladies, graph: Graph, steps: int) -> list[tuple[np.ndarray, Block]]:
    """By step: (sources that were drawn, the block)."""
    seeds = [{"b": torch.arange(graph.num_dst)}] * steps
    made: Any = sampler.sample_bulk([graph], seeds, seed=3)
    return [(each.input_nodes["a"].numpy(), each.blocks[0][graph.relation]) for each in made]


def shares(graph: Graph, law: Law) -> np.ndarray:
    """The obvious model. "degree": squared column norms of the row-normalised adjacency matrix A, normalised;
    "count": P = Q A with Q one row that has all nodes, squared and normalised."""
    matrix = np.zeros((graph.num_dst, graph.num_src))
    for v in range(graph.num_dst):
        begin, end = graph.indptr[v], graph.indptr[v + 1]
        np.add.at(matrix[v], graph.indices[begin:end], 1 if law == "count" else 1 / max(1, end - begin))
    norms = (np.ones((1, graph.num_dst)) @ matrix)[0] ** 2 if law == "count" else (matrix**2).sum(0)
    return norms / norms.sum()


def inclusion(share: np.ndarray, size: int) -> np.ndarray:
    """min(1, c share) with the sum `size`, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c * share).sum() < size else (low, c)
    return np.minimum(1, low * share)


@pytest.mark.parametrize("law", ["degree", "count"])
def test_draws_with_replacement_follow_the_law(law: Law) -> None:
    """First with one draw, then with many draws and their weights."""
    graph, steps = distinct_graph(40, 60, (0, 12)), 1000
    share, made = shares(graph, law), blocks(Ladies([1], law=law), graph, steps)
    sources = np.array([drawn.item() for drawn, _ in made])
    weights = np.concatenate([block.weights.numpy() for _, block in made])
    edges = [block.num_edges for _, block in made]
    np.testing.assert_allclose(weights, 1 / share[sources.repeat(edges)], rtol=1e-5)
    counts = np.bincount(sources, minlength=60)
    possible = share > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], steps * share[possible]).pvalue > UNLIKELY
    [(drawn, block)] = blocks(Ladies([20], law=law), graph, 1)
    assert len(drawn) <= 20
    times = block.weights.numpy() * 20 * share[drawn[block.indices.numpy()]]
    np.testing.assert_allclose(times, np.round(times), rtol=1e-4)


def test_parallel_edges_count_as_several() -> None:
    """Source 0 has three edges to one node, source 1 one edge to each of three."""
    indptr, sources = np.array([0, 4, 5, 6]), np.array([0, 0, 0, 1, 1, 1])
    graph = Graph(("a", "to", "b"), 2, 3, indptr, sources, None)
    for law, expected in (("count", [0.5, 0.5]), ("degree", [3 / 36, 33 / 36])):
        [(drawn, block)] = blocks(Ladies([1], law=law), graph, 1)
        np.testing.assert_allclose(block.weights.numpy(), 1 / np.array(expected)[drawn[0]], rtol=1e-6)


@pytest.mark.parametrize(("size", "law"), [(25, "degree"), (100, "count")])
def test_poisson_sources_are_independent(size: int, law: Law) -> None:
    graph, steps = distinct_graph(40, 60, (0, 12)), 1000
    share = shares(graph, law)
    possible = share > 0
    p = np.where(possible, 1.0, 0.0) if size >= possible.sum() else inclusion(share, size)
    made = blocks(Ladies([size], poisson=True, law=law), graph, steps)
    weights = np.concatenate([block.weights.numpy() for _, block in made])
    sources = np.concatenate([drawn[block.indices.numpy()] for drawn, block in made])
    np.testing.assert_allclose(weights, 1 / p[sources], rtol=1e-5)
    counts = np.bincount(np.concatenate([drawn for drawn, _ in made]), minlength=60)
    assert (counts[p == 1] == steps).all()
    free = (p > 0) & (p < 1)
    if not free.any():
        return
    z = (counts - steps * p)[free] / np.sqrt(steps * p * (1 - p))[free]
    assert UNLIKELY < stats.chi2.sf((z**2).sum(), free.sum()) < 1 - UNLIKELY
    assert np.var([len(drawn) for drawn, _ in made]) == pytest.approx((p * (1 - p)).sum(), rel=0.2)


def test_distinct_sources_are_successive_draws() -> None:
    graph, steps, size = distinct_graph(40, 60, (0, 12)), 800, 30
    share, rng = shares(graph, "degree"), np.random.default_rng(5)
    counts, expected = np.zeros(60), np.zeros(60)
    for drawn, _ in blocks(Ladies([size], replace=False), graph, steps):
        assert len(drawn) == len(set(drawn.tolist())) == size
        counts[drawn] += 1
        expected[rng.choice(60, size, replace=False, p=share)] += 1  # the obvious model: draw after draw
    possible = share > 0
    assert stats.chi2_contingency([counts[possible], expected[possible]]).pvalue > UNLIKELY


def test_every_edge_from_drawn_sources_is_taken() -> None:
    graph = make_graph(mixed_degrees(1000), dtype=np.int32)
    minibatch: Any = Ladies([200, 100]).sample(graph, torch.arange(100), step=2, seed=0)
    nodes = minibatch.input_nodes.numpy()
    for block in minibatch.blocks:
        drawn = np.unique(nodes[block.indices.numpy()])
        positions = []
        for v in nodes[: block.num_dst]:
            of_node = np.arange(graph.indptr[v], graph.indptr[v + 1])
            positions.extend(of_node[np.isin(graph.indices[of_node], drawn)])
        assert block.positions.tolist() == positions
        assert np.array_equal(graph.indices[positions], nodes[block.indices.numpy()])


def test_all_relations_and_edge_cases() -> None:
    graphs = citations()
    sizes = {g.relation: size for g, size in zip(graphs, (10, 0, 5, -1), strict=True)}
    some: Any = Ladies([sizes], poisson=True).sample(graphs, {"paper": torch.arange(50)}, seed=0)
    edges = [block.num_edges for block in some.blocks[0].values()]
    assert edges[0] > 0
    assert edges[1:] == [0, 0, 50]
    graph, alone = make_graph([3] * 20), make_graph([0] * 5)
    both = Ladies([-1]), Neighbor([-1])
    everything, same = (sampler.sample(graph, torch.arange(20), seed=0) for sampler in both)
    assert everything.blocks[0].positions.tolist() == list(range(60))
    assert torch.equal(everything.input_nodes, same.input_nodes)
    few = Ladies([100], replace=False).sample(graph, torch.arange(20), seed=0).blocks[0]
    assert few.positions.tolist() == list(range(60)), "there are fewer sources"
    assert few.weights.tolist() == [1.0] * 60
    for poisson in (False, True):
        none = Ladies([4], poisson=poisson).sample(graph, torch.arange(0), seed=0)
        assert none.blocks[0].num_edges == 0
        isolated = Ladies([4], poisson=poisson).sample(alone, torch.tensor([1, 1]), seed=0)
        assert isolated.input_nodes.tolist() == [1, 1]
