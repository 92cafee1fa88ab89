"""Neighbor: what the model lacks: probabilities and counts of draws with weights and with replacement."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datasets import make_graph
from every_sampler import GRAPH, NEAR, assert_refused
from sampling_model import citations
from scipy import stats

from gids.sampler import Block, LocalityBias, Neighbor
from gids.store import Graph

NODES = 20_000
UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not
WEIGHTS = np.array([0.5, 3, 0, 1, 2])


def draw(
    degree: int, fanout: int, *, step: int = 0, seed: int = 3, **options: Any
) -> tuple[npt.NDArray[np.int64], Block]:
    """(which in-edges each of NODES nodes drew, [NODES, fanout]; the block)."""
    graph = make_graph(np.full(NODES, degree))
    sampler = Neighbor([fanout], **options)
    [block] = sampler.sample(graph, torch.arange(NODES), seed=seed, step=step).blocks
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
        assert block.weights is not None
        np.testing.assert_allclose(block.weights.numpy(), 1 / (2 * share[drawn.ravel()]), rtol=1e-5)
    else:
        assert block.weights is None


@pytest.mark.parametrize("kappa", [7, 64])
def test_dependent_neighbors_are_uniform_in_every_minibatch(kappa: int) -> None:
    drawn, block = draw(6, 2, batch_dependency=kappa)
    pairs = dict.fromkeys(itertools.combinations(range(6), 2), 1 / 15)
    assert_distributed(drawn, pairs)
    assert block.weights is None


@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True}, {"weighted": True}, {"weighted": True, "replace": True}, {"near": True}],
    ids=str,
)
def test_every_node_draws_as_many_edges_as_it_can(options: dict[str, bool]) -> None:
    replace = options.get("replace", False)
    weights = np.ones(GRAPH.num_edges)
    arguments: dict[str, Any] = {"replace": replace}
    if options.get("weighted"):
        weights = np.random.default_rng(0).integers(0, 3, GRAPH.num_edges).astype(np.float64)
        arguments["weights"] = weights
    elif options.get("near"):
        arguments["locality"] = LocalityBias(torch.from_numpy(NEAR), 6)
    elif not replace:
        arguments["batch_dependency"] = 8
    possible = np.diff(np.concatenate([[0], np.cumsum(weights > 0)])[GRAPH.indptr])
    for fanout in (4, 60, -1):
        minibatch = Neighbor([fanout, 3], **arguments).sample(GRAPH, torch.arange(1000), step=3, seed=0)
        for block, wanted in zip(minibatch.blocks, (fanout, 3), strict=True):
            assert isinstance(block, Block)
            expected = possible[minibatch.input_nodes[: block.num_dst].numpy()]  # type: ignore[index]
            if wanted > 0:
                expected = np.where(expected > 0, wanted, 0) if replace else np.minimum(expected, wanted)
            assert block.indptr.diff().tolist() == expected.tolist()
            assert (weights[block.positions.numpy()] > 0).all()
            if not replace:
                assert len(np.unique(block.positions.numpy())) == block.num_edges


def test_weights_by_relation() -> None:
    graphs = citations()
    one = graphs[1]
    weights = {one.relation: np.zeros(one.num_edges, np.float32)}
    minibatch = Neighbor([4], weights=weights).sample(graphs, {"paper": torch.arange(100)}, seed=0)
    for relation, block in minibatch.blocks[0].items():  # type: ignore[union-attr]
        assert (block.weights is not None) == (relation == one.relation)
        assert (block.num_edges == 0) == (relation == one.relation or relation[2] == "author")


# --- what is refused ---


def test_bad_weights() -> None:
    graph, seeds, make = make_graph([3, 4]), torch.arange(2), partial(Neighbor, [2])
    negative = r"must be 0 or more and finite \(weight 1 is -2\.0\)"
    of_relation = {("a", "b", "c"): np.ones(6)}
    assert_refused(
        (ValueError, "weight 2 is nan", lambda: make(weights=np.array([1, 2, np.nan]))),
        (ValueError, negative, lambda: make(weights=np.array([1.0, -2, 0]))),
        (ValueError, "weight 0 is inf", lambda: make(weights=np.array([np.inf]))),
        (TypeError, r"must be float\[num_edges\]", lambda: make(weights=np.arange(7))),
        (TypeError, r"must be float\[num_edges\]", lambda: make(weights=np.ones((7, 1)))),
        (TypeError, r"must be float\[num_edges\]", lambda: make(weights=torch.ones(7, dtype=torch.int64))),
        (ValueError, r"must have 7 values.*\(got 6\)", lambda: make(weights=np.ones(6)).sample(graph, seeds)),
        (
            ValueError,
            "give a dictionary by relation",
            lambda: make(weights=np.ones(6)).sample(citations(), {"paper": seeds}),
        ),
        (ValueError, "no graph has that", lambda: make(weights=of_relation).sample(graph, seeds)),
    )


def test_parallel_edges_are_drawn_as_different_ones() -> None:
    graph = Graph(("a", "b", "a"), 2, 2, np.array([0, 3, 3]), np.array([1, 1, 1]), None)
    for options in ({"weights": np.ones(3)}, {"batch_dependency": 4}):
        [block] = Neighbor([2], **options).sample(graph, torch.arange(2), seed=0).blocks  # type: ignore[arg-type]
        assert block.num_edges == len(np.unique(block.positions.numpy())) == 2  # type: ignore[union-attr]
