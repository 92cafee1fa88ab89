"""What the models lack: probabilities of draws, and unbiased sums. Seeds are fixed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from every_sampler import GRAPH, NEAR
from labor_model import EXAMPLES, factor, probabilities
from sampling_model import distinct_graph, make_graph
from scipy import stats

from gids.sampler import Block, Labor, Ladies, LocalityBias, Neighbor

NODES = 20_000
UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not
WEIGHTS = np.array([0.5, 3, 0, 1, 2])


def draw(degree: int, fanout: int, **options: Any) -> tuple[npt.NDArray[np.int64], Block]:
    """(which in-edges each of NODES nodes drew, [NODES, fanout]; the block)."""
    graph = make_graph(np.full(NODES, degree))
    [block] = Neighbor([fanout], **options).sample(graph, torch.arange(NODES), seed=3).blocks
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
    drawn, block = draw(5, 2, weights=np.tile(WEIGHTS, NODES))
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
    drawn, block = draw(5, 2, replace=True, weights=np.tile(WEIGHTS, NODES) if weighted else None)
    share = WEIGHTS / WEIGHTS.sum() if weighted else np.full(5, 0.2)
    possible = np.flatnonzero(share)
    pairs = itertools.product(possible, possible)
    assert_distributed(drawn, {(int(i), int(j)): float(share[i] * share[j]) for i, j in pairs})
    if weighted:
        np.testing.assert_allclose(block.weights.numpy(), 1 / (2 * share[drawn.ravel()]), rtol=1e-5)
    else:
        assert block.weights is None


def test_dependent_neighbors_are_uniform_in_every_minibatch() -> None:
    drawn, block = draw(6, 2, batch_dependency=7)
    assert_distributed(drawn, dict.fromkeys(itertools.combinations(range(6), 2), 1 / 15))
    assert block.weights is None


@pytest.mark.parametrize("kind", ["dependent", "replaced", "weighted", "weighted, replaced", "near"])
def test_every_node_draws_as_many_edges_as_it_can(kind: str) -> None:
    replace, weights = "replaced" in kind, np.ones(GRAPH.num_edges)
    arguments: dict[str, Any] = {"replace": replace}
    if "weighted" in kind:
        weights = np.random.default_rng(0).integers(0, 3, GRAPH.num_edges).astype(np.float64)
        arguments["weights"] = weights
    elif kind == "near":
        arguments["locality"] = LocalityBias(torch.from_numpy(NEAR), 6)
    elif kind == "dependent":
        arguments["batch_dependency"] = 8
    possible = np.diff(np.concatenate([[0], np.cumsum(weights > 0)])[GRAPH.indptr])
    for fanout in (4, 60, -1):
        minibatch = Neighbor([fanout, 3], **arguments).sample(GRAPH, torch.arange(1000), step=3, seed=0)
        for block, wanted in zip(minibatch.blocks, (fanout, 3), strict=True):
            expected = possible[minibatch.input_nodes[: block.num_dst].numpy()]
            if wanted > 0:
                expected = np.where(expected > 0, wanted, 0) if replace else np.minimum(expected, wanted)
            assert block.indptr.diff().tolist() == expected.tolist()
            assert (weights[block.positions.numpy()] > 0).all()
            if not replace:
                assert len(np.unique(block.positions.numpy())) == block.num_edges


SMALL = distinct_graph(60, 90, (1, 40), seed=1)


@pytest.mark.parametrize(
    "sampler",
    [
        Neighbor([5], weights=np.random.default_rng(4).exponential(1, SMALL.num_edges) + 0.3),
        Labor([4], importance_sampling=1, fixed_count=True),
        Ladies([25], replace=False),
    ],
    ids=["weights", "labor-1 of fixed count", "distinct ladies"],
)
def test_sums_are_estimated_without_bias(sampler: Any) -> None:
    """By weights that are known only after the draw."""
    steps, nodes = 1000, SMALL.num_dst
    x = np.random.default_rng(4).normal(2, 1, SMALL.num_src)
    exact = np.add.reduceat(x[SMALL.indices], SMALL.indptr[:-1])
    estimates = np.empty((steps, nodes))
    seeds = [{"b": torch.arange(nodes)}] * steps
    for step, minibatch in enumerate(sampler.sample_bulk([SMALL], seeds, seed=3)):
        [block] = minibatch.blocks[0].values()
        values = block.weights.numpy() * x[SMALL.indices[block.positions.numpy()]]
        estimates[step] = np.bincount(np.repeat(np.arange(nodes), block.indptr.diff()), values, nodes)
    spread = estimates.std(0, ddof=1) / np.sqrt(steps)
    certain = spread < 1e-6  # the node takes all of its neighbors
    np.testing.assert_allclose(estimates.mean(0)[certain], exact[certain], rtol=1e-5)
    assert certain.sum() < nodes / 3
    z = (estimates.mean(0) - exact)[~certain] / spread[~certain]
    assert np.abs(z).max() < stats.norm.isf(UNLIKELY / len(z)), z


def test_the_model_of_labor_has_the_probabilities_of_the_derivation() -> None:
    """Of a node with many neighbors, which share some with nodes of fewer neighbors than the fanout."""
    for fanout, sources, by_rounds in EXAMPLES:
        for rounds, expected in by_rounds.items():
            pi = probabilities(sources, fanout, rounds)
            c = factor([pi[t] for t in sources[-1]], fanout)
            found = [min(1, c * pi[t]) for t in sources[-1]]
            np.testing.assert_allclose(found, expected, rtol=1e-3 if rounds < 0 else 1e-6)
