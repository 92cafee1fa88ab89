"""LABOR equals its model bit by bit, with any number of threads; probabilities; errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import make_graph
from labor_model import EXAMPLES, copies_of, frequencies, labor
from sampling_model import citations, mixed_degrees, sample

from gids.sampler import Labor, Minibatch
from gids.store import Graph


def assert_equal(
    minibatch: Minibatch, graphs: Sequence[Graph], seeds: dict[str, torch.Tensor], sampler: Labor
) -> None:
    """sampler: with the same number for every relation."""
    fanouts = [[f] * len(graphs) for f in reversed(sampler.fanouts)]
    draw = labor(
        graphs,
        (7, minibatch.epoch, minibatch.step),
        times=sampler.importance_sampling,
        fixed_count=sampler.fixed_count,
        layer_dependency=sampler.layer_dependency,
    )
    sample(graphs, {t: ids.tolist() for t, ids in seeds.items()}, fanouts, draw).check(
        minibatch, weighted=True
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fixed_count": True},
        {"layer_dependency": True},
        {"importance_sampling": 1},
        {"importance_sampling": 3, "layer_dependency": True},
        {"importance_sampling": -1},
        {"importance_sampling": 1, "fixed_count": True},
    ],
    ids=str,
)
def test_minibatches_equal_the_model(options: dict[str, Any]) -> None:
    graph = make_graph(mixed_degrees(200), dtype=np.int32)
    type_ = graph.relation[0]
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(200)[:20])
    for fanouts in ([10], [3, 40], [-1, 4]):
        sampler = Labor(fanouts, threads=2, **options)
        minibatch = sampler.sample(graph, seeds, seed=7, epoch=3, step=1 << 40)
        assert_equal(minibatch, [graph], {type_: seeds}, sampler)


def test_relations_from_one_type_share_their_numbers() -> None:
    graphs = citations()
    seeds = {"paper": torch.arange(5, 25), "author": torch.arange(9)}
    for options in ({}, {"fixed_count": True}, {"importance_sampling": 1}):
        sampler = Labor([3, 4], **options)  # type: ignore[arg-type]
        assert_equal(sampler.sample(graphs, seeds, seed=7), graphs, seeds, sampler)


def test_a_relation_may_be_left_out() -> None:
    graphs = citations()
    for importance_sampling in (0, 1):
        fanouts = {g.relation: i for i, g in enumerate(graphs)}
        minibatch = Labor([fanouts], importance_sampling=importance_sampling).sample(
            graphs,
            {"paper": torch.arange(50)},
            seed=0,
        )
        edges = [block.num_edges for block in minibatch.blocks[0].values()]  # type: ignore[union-attr]
        assert edges[0] == edges[2] == 0
        assert edges[1] > 0


@pytest.mark.parametrize("seeds", [[], [5, 5, 2, 5], [0]], ids=str)
def test_seeds_may_be_none_may_repeat_and_may_be_isolated(seeds: list[int]) -> None:
    ids = torch.tensor(seeds, dtype=torch.int64)
    for graph in (make_graph(mixed_degrees(50)), make_graph([0] * 9)):
        for importance_sampling in (0, -1):
            sampler = Labor([2, 3], importance_sampling=importance_sampling)
            assert_equal(sampler.sample(graph, ids, seed=7), [graph], {graph.relation[0]: ids}, sampler)


# --- what is refused ---


@pytest.mark.parametrize("kappa", [0, -1, 0.5, 1.5, math.nan, True, "8", None], ids=str)
def test_bad_batch_dependencies(kappa: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_dependency=.*or more, or math\.inf"):
        Labor([2], batch_dependency=kappa)


@pytest.mark.parametrize("times", [-2, 1.0, True, None], ids=str)
def test_bad_importance_sampling(times: Any) -> None:
    with pytest.raises(ValueError, match=r"importance_sampling must be .*-1 for convergence"):
        Labor([2], importance_sampling=times)


@pytest.mark.parametrize("example", [0, 1])
def test_edges_are_taken_with_the_probabilities_of_the_derivation(example: int) -> None:
    """Of a node with many neighbors, which share some with nodes of fewer neighbors than the fanout."""
    fanout, sources, by_rounds = EXAMPLES[example]
    copies = 20_000
    graph = copies_of(sources, copies)
    for rounds, expected in by_rounds.items():
        sampler = Labor([fanout], importance_sampling=rounds)
        minibatch = sampler.sample([graph], {"b": torch.arange(graph.num_dst)}, seed=3)
        [block] = minibatch.blocks[0].values()  # type: ignore[union-attr]
        p = np.array(expected)
        shares = frequencies(block.positions.numpy(), sources, copies)
        assert (np.abs(shares - p) <= 4 * np.sqrt(p * (1 - p) / copies) + 1e-4).all(), (rounds, shares)
        assert block.weights is not None
        per_copy = np.ones(graph.indptr[len(sources)])
        per_copy[-len(p) :] = 1 / p
        expected_weights = per_copy[block.positions % len(per_copy)]
        np.testing.assert_allclose(block.weights, expected_weights, rtol=1e-3 if rounds < 0 else 1e-6)
