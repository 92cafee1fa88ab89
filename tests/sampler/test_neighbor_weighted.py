"""Neighbor with weights and with replacement: probabilities, estimates, errors. Seeds are fixed."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from sampling_graphs import citations, mixed_degrees
from scipy import stats

from gids.sampler import Block, Neighbor
from gids.store import Graph

NODES = 20_000
UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not
WEIGHTS = np.array([0.5, 3, 0, 1, 2])


def draw(fanout: int, degree: int, **options: Any) -> tuple[np.ndarray, Block]:
    """(which in-edges each of NODES nodes drew, [NODES, fanout]; the block)."""
    graph = make_graph(np.full(NODES, degree))
    sampler = Neighbor([fanout], **options)
    [block] = sampler.sample(graph, torch.arange(NODES), seed=3, step=5).blocks
    assert isinstance(block, Block)
    return block.positions.numpy().reshape(NODES, fanout) - np.arange(NODES)[:, None] * degree, block


def assert_distributed(outcomes: np.ndarray, probabilities: dict[tuple[int, ...], float]) -> None:
    found, counts = np.unique(outcomes, axis=0, return_counts=True)
    observed = {tuple(map(int, key)): int(n) for key, n in zip(found, counts, strict=True)}
    assert observed.keys() <= probabilities.keys()
    keys = list(probabilities)
    expected = np.array([probabilities[k] for k in keys])
    assert expected.sum() == pytest.approx(1)
    p = stats.chisquare([observed.get(k, 0) for k in keys], len(outcomes) * expected).pvalue
    assert p > UNLIKELY, p


def test_weighted_pairs_have_the_probabilities_of_successive_draws() -> None:
    drawn, block = draw(2, 5, weights=np.tile(WEIGHTS, NODES))
    probabilities: dict[tuple[int, ...], float] = {}
    total = WEIGHTS.sum()
    for i, j in itertools.permutations([0, 1, 3, 4], 2):
        pair = (min(i, j), max(i, j))
        p = float(WEIGHTS[i] / total * WEIGHTS[j] / (total - WEIGHTS[i]))
        probabilities[pair] = probabilities.get(pair, 0) + p
    assert_distributed(drawn, probabilities)
    assert block.weights is not None


@pytest.mark.parametrize("weighted", [False, True])
def test_draws_with_replacement_are_independent(weighted: bool) -> None:
    drawn, block = draw(2, 5, replace=True, weights=np.tile(WEIGHTS, NODES) if weighted else None)
    share = WEIGHTS / WEIGHTS.sum() if weighted else np.full(5, 0.2)
    possible = np.flatnonzero(share)
    pairs = itertools.product(possible, possible)
    assert_distributed(drawn, {(int(i), int(j)): float(share[i] * share[j]) for i, j in pairs})
    if weighted:
        assert block.weights is not None
        np.testing.assert_allclose(block.weights.numpy(), 1 / (2 * share[drawn.ravel()]), rtol=1e-5)
    else:
        assert block.weights is None


@pytest.mark.parametrize("kappa", [7, 64])
def test_dependent_neighbors_are_uniform_in_every_minibatch(kappa: int) -> None:
    drawn, block = draw(2, 6, batch_dependency=kappa)
    pairs = dict.fromkeys(itertools.combinations(range(6), 2), 1 / 15)
    assert_distributed(drawn, pairs)
    assert block.weights is None


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"batch_dependency": 8}], ids=str)
def test_weighted_sums_are_estimated_without_bias(options: dict[str, Any]) -> None:
    graph, steps = make_graph(mixed_degrees(60), num_src=500, relation=("a", "to", "b")), 3000
    rng = np.random.default_rng(4)
    x = rng.normal(2, 1, 500)
    weights = torch.from_numpy(rng.exponential(1, graph.num_edges)) + 0.3
    sampler = Neighbor([5], weights=weights, threads=1, **options)
    estimates = np.empty((steps, 60))
    for step in range(steps):  # so far apart that none depends on another
        [block] = (
            sampler.sample([graph], {graph.relation[2]: torch.arange(60)}, seed=3, step=step * 17)
            .blocks[0]
            .values()
        )  # type: ignore[union-attr]
        assert block.weights is not None
        values = block.weights.numpy() * x[graph.indices[block.positions.numpy()]]
        ends = np.repeat(np.arange(60), np.diff(block.indptr.numpy()))
        estimates[step] = np.bincount(ends, values, 60)
    exact = np.bincount(np.repeat(np.arange(60), np.diff(graph.indptr)), x[graph.indices], 60)
    spread = estimates.std(0, ddof=1) / np.sqrt(steps)
    certain = spread < 1e-6
    np.testing.assert_allclose(estimates.mean(0)[certain], exact[certain], rtol=1e-5)
    z = (estimates.mean(0) - exact)[~certain] / spread[~certain]
    assert len(z) > 25
    assert np.abs(z).max() < stats.norm.isf(UNLIKELY / len(z)), z


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_counts_threads_and_pickles(replace: bool, weighted: bool) -> None:
    graph = make_graph(mixed_degrees(3000), dtype=np.int32)
    weights = np.random.default_rng(0).integers(0, 3, graph.num_edges).astype(np.float64)
    options: dict[str, Any] = {"replace": replace, "weights": weights if weighted else None}
    if not (replace or weighted):
        options["batch_dependency"] = 8
    possible = np.add.reduceat(np.append(weights > 0, False), graph.indptr[:-1]) * (np.diff(graph.indptr) > 0)
    if not weighted:
        possible = np.diff(graph.indptr)
    seeds = torch.arange(3000)
    for fanout in (4, 60, -1):
        kinds = [Neighbor([fanout, 3], threads=n, **options) for n in (1, 2, 8)]
        kinds.append(pickle.loads(pickle.dumps(kinds[0])))
        first, *others = [s.sample(graph, seeds, step=3) for s in kinds]
        for other in others:
            assert torch.equal(first.input_nodes, other.input_nodes)  # type: ignore[arg-type]
            for a, b in zip(first.blocks, other.blocks, strict=True):
                assert torch.equal(a.positions, b.positions)  # type: ignore[union-attr]
        for block, wanted in zip(first.blocks, (fanout, 3), strict=True):
            assert isinstance(block, Block)
            nodes = first.input_nodes[: block.num_dst]  # type: ignore[index]
            expected = possible[nodes.numpy()]
            if wanted > 0:
                expected = np.where(expected > 0, wanted, 0) if replace else np.minimum(expected, wanted)
            assert block.indptr.diff().tolist() == expected.tolist()
            assert not weighted or (weights[block.positions.numpy()] > 0).all()
            if not replace:
                assert len(np.unique(block.positions.numpy())) == block.num_edges


def test_weights_by_relation() -> None:
    graphs = citations()
    one = graphs[1]
    weights = {one.relation: np.zeros(one.num_edges, np.float32)}
    minibatch = Neighbor([4], weights=weights).sample(graphs, {"paper": torch.arange(100)})
    for relation, block in minibatch.blocks[0].items():  # type: ignore[union-attr]
        assert (block.weights is not None) == (relation == one.relation)
        assert (block.num_edges == 0) == (relation == one.relation or relation[2] == "author")


# --- what is refused ---


def test_bad_weights() -> None:
    graph = make_graph([3, 4])
    for bad, message in (
        ([1, 2, np.nan], "weight 2 is nan"),
        ([1, -2, 0], r"must be 0 or more and finite \(weight 1 is -2\.0\)"),
        ([np.inf], "weight 0 is inf"),
    ):
        with pytest.raises(ValueError, match=message):
            Neighbor([2], weights=np.array(bad, float))
    for wrong in (np.arange(7), np.ones((7, 1)), torch.ones(7, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"must be float\[num_edges\]"):
            Neighbor([2], weights=wrong)
    with pytest.raises(ValueError, match=r"weights of .* must have 7 values.*\(got 6\)"):
        Neighbor([2], weights=np.ones(6)).sample(graph, torch.arange(2))
    with pytest.raises(ValueError, match="give a dictionary by relation"):
        Neighbor([2], weights=np.ones(6)).sample(citations(), {"paper": torch.arange(2)})
    with pytest.raises(ValueError, match="no graph has that relation"):
        Neighbor([2], weights={("a", "b", "c"): np.ones(6)}).sample(graph, torch.arange(2))


def test_parallel_edges_are_drawn_as_different_ones() -> None:
    graph = Graph(("a", "b", "a"), 2, 2, np.array([0, 3, 3]), np.array([1, 1, 1]), None)
    for options in ({"weights": np.ones(3)}, {"batch_dependency": 4}):
        [block] = Neighbor([2], **options).sample(graph, torch.arange(2)).blocks  # type: ignore[arg-type]
        assert block.num_edges == len(np.unique(block.positions.numpy())) == 2  # type: ignore[union-attr]
