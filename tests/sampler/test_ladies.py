"""LADIES: probabilities of sources, unbiased estimates, every edge from them. Seeds are fixed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from datasets import distinct_graph, make_graph
from sampling_graphs import citations, mixed_degrees
from scipy import stats

from gids.errors import FormatError
from gids.sampler import Block, Ladies, Neighbor
from gids.store import Graph

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not


def one_block(sampler: Ladies, graph: Graph, step: int) -> tuple[np.ndarray, Block]:
    """(sources that were drawn, the block)."""
    minibatch = sampler.sample([graph], {"b": torch.arange(graph.num_dst)}, seed=3, step=step)
    [block] = minibatch.blocks[0].values()  # type: ignore[union-attr]
    return minibatch.input_nodes["a"].numpy(), block  # type: ignore[index]


def shares(graph: Graph) -> np.ndarray:
    """The obvious model: squared column norms of the row-normalised adjacency matrix, normalised."""
    matrix = np.zeros((graph.num_dst, graph.num_src))
    for v in range(graph.num_dst):
        begin, end = graph.indptr[v], graph.indptr[v + 1]
        matrix[v, graph.indices[begin:end]] = 1 / max(1, end - begin)
    norms = (matrix**2).sum(0)
    return norms / norms.sum()


def inclusion(share: np.ndarray, size: int) -> np.ndarray:
    """min(1, c share) with the sum `size`, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c * share).sum() < size else (low, c)
    return np.minimum(1, low * share)


def test_draws_with_replacement_follow_the_column_norms() -> None:
    """First with one draw, then with many draws and their weights."""
    graph, steps = distinct_graph(40, 60, (0, 12)), 4000
    share = shares(graph)
    counts = np.zeros(60)
    for step in range(steps):
        drawn, block = one_block(Ladies([1], threads=1), graph, step)
        assert len(drawn) == 1
        counts[drawn] += 1
        assert block.weights is not None
        np.testing.assert_allclose(block.weights.numpy(), 1 / share[drawn[0]], rtol=1e-5)
    possible = share > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], steps * share[possible]).pvalue > UNLIKELY
    drawn, block = one_block(Ladies([20]), graph, 0)
    assert len(drawn) <= 20
    times = block.weights.numpy() * 20 * share[drawn[block.indices.numpy()]]  # type: ignore[union-attr]
    np.testing.assert_allclose(times, np.round(times), rtol=1e-4)


@pytest.mark.parametrize("size", [5, 30, 55, 100])
def test_poisson_sources_are_independent(size: int) -> None:
    graph, steps = distinct_graph(40, 60, (0, 12)), 3000
    share = shares(graph)
    possible = share > 0
    p = np.where(possible, 1.0, 0.0) if size >= possible.sum() else inclusion(share, size)
    counts, how_many = np.zeros(60), []
    sampler = Ladies([size], poisson=True, threads=1)
    for step in range(steps):
        drawn, block = one_block(sampler, graph, step)
        counts[drawn] += 1
        how_many.append(len(drawn))
        assert block.weights is not None
        np.testing.assert_allclose(block.weights.numpy(), 1 / p[drawn[block.indices.numpy()]], rtol=1e-5)
    assert (counts[p == 1] == steps).all()
    free = (p > 0) & (p < 1)
    if not free.any():
        return
    z = (counts - steps * p)[free] / np.sqrt(steps * p * (1 - p))[free]
    assert UNLIKELY < stats.chi2.sf((z**2).sum(), free.sum()) < 1 - UNLIKELY
    assert np.var(how_many) == pytest.approx((p * (1 - p)).sum(), rel=0.1)


@pytest.mark.parametrize("poisson", [False, True])
def test_sums_are_estimated_without_bias(poisson: bool) -> None:
    graph, steps = distinct_graph(40, 60, (0, 12)), 4000
    x = np.random.default_rng(4).normal(2, 1, 60)
    sampler = Ladies([25], poisson=poisson, threads=1)
    estimates = np.empty((steps, 40))
    for step in range(steps):
        _, block = one_block(sampler, graph, step)
        values = block.weights.numpy() * x[graph.indices[block.positions.numpy()]]  # type: ignore[union-attr]
        ends = np.repeat(np.arange(40), np.diff(block.indptr.numpy()))
        estimates[step] = np.bincount(ends, values, 40)
    degrees = np.diff(graph.indptr)
    exact = np.bincount(np.repeat(np.arange(40), degrees), x[graph.indices], 40)
    spread = estimates.std(0, ddof=1) / np.sqrt(steps)
    certain = spread < 1e-6  # without neighbors, or all of them certain
    np.testing.assert_allclose(estimates.mean(0)[certain], exact[certain], rtol=1e-5)
    assert certain.sum() < 10
    z = (estimates.mean(0) - exact)[~certain] / spread[~certain]
    assert np.abs(z).max() < stats.norm.isf(UNLIKELY / len(z)), z


@pytest.mark.parametrize("poisson", [False, True])
def test_every_edge_from_drawn_sources_is_taken_for_any_number_of_threads(poisson: bool) -> None:
    graph = make_graph(mixed_degrees(3000), dtype=np.int32)
    seeds = torch.arange(300)
    kinds = [Ladies([400, 200], poisson=poisson, threads=n) for n in (1, 2, 8)]
    kinds.append(pickle.loads(pickle.dumps(kinds[0])))
    first, *others = [s.sample(graph, seeds, step=2) for s in kinds]
    for other in others:
        assert torch.equal(first.input_nodes, other.input_nodes)  # type: ignore[arg-type]
        for a, b in zip(first.blocks, other.blocks, strict=True):
            assert torch.equal(a.positions, b.positions)  # type: ignore[union-attr]
            assert torch.equal(a.weights, b.weights)  # type: ignore[union-attr, arg-type]
    nodes = first.input_nodes.numpy()  # type: ignore[union-attr]
    for block in first.blocks:
        assert isinstance(block, Block)
        drawn = np.unique(nodes[block.indices.numpy()])
        positions = []
        for v in nodes[: block.num_dst]:
            of_node = np.arange(graph.indptr[v], graph.indptr[v + 1])
            positions.extend(of_node[np.isin(graph.indices[of_node], drawn)])
        assert block.positions.tolist() == positions
        assert np.array_equal(graph.indices[positions], nodes[block.indices.numpy()])
    assert kinds[0].nbytes > 0


def test_all_relations_and_edge_cases() -> None:
    graphs = citations()
    sizes = {g.relation: size for g, size in zip(graphs, (10, 0, 5, -1), strict=True)}
    minibatch = Ladies([sizes], poisson=True).sample(graphs, {"paper": torch.arange(50)})
    edges = [block.num_edges for block in minibatch.blocks[0].values()]  # type: ignore[union-attr]
    assert edges[0] > 0
    assert edges[1:] == [0, 0, 50]
    graph = make_graph([3] * 20)
    everything = Ladies([-1]).sample(graph, torch.arange(20))
    assert everything.blocks[0].positions.tolist() == list(range(60))  # type: ignore[union-attr]
    same = Neighbor([-1]).sample(graph, torch.arange(20))
    assert torch.equal(everything.input_nodes, same.input_nodes)  # type: ignore[arg-type]
    for poisson in (False, True):
        for given in (make_graph([0] * 5), graph):
            none = Ladies([4], poisson=poisson).sample(given, torch.arange(0))
            assert none.blocks[0].num_edges == 0  # type: ignore[union-attr]
        isolated = Ladies([4], poisson=poisson).sample(make_graph([0] * 5), torch.tensor([1, 1]))
        assert isolated.input_nodes.tolist() == [1, 1]  # type: ignore[union-attr]
    assert repr(Ladies([4], poisson=True)) == "Ladies([4], poisson=True)"


def test_wrong_sizes_and_graphs_are_refused() -> None:
    for bad in ([], [0], [-2], [2.5]):
        with pytest.raises(ValueError, match="sizes="):
            Ladies(bad)  # type: ignore[arg-type]
    good = make_graph([4] * 20)
    indices = good.indices.copy()
    indices[41] = 20
    spoiled = Graph(good.relation, 20, 20, good.indptr, indices, None)
    with pytest.raises(FormatError, match=r"indices\[41\] is outside 0 to 19"):
        Ladies([4]).sample(spoiled, torch.arange(20))
