"""The sampling by matrices of bench/matrices.py: its laws, and the comparison with our samplers."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import matrix_sampling
from harness import Figures
from matrices import Adjacency, Clock, graphsage, ladies, sample

UNLIKELY = 1e-3
BULK = 4000
ARGS = Namespace(json=None, small=True, draws=2000, seed=0, fanouts=[], sizes=[])


def layer_of(step, size, seeds):
    """The layer of BULK minibatches with these seeds, and the graph."""
    graph = matrix_sampling.small_graph(0)
    rng = np.random.default_rng(1)
    [layer], _ = sample(step, Adjacency(graph), [seeds] * BULK, [size], rng, Clock())
    return layer, graph


@pytest.mark.parametrize("law", ["count", "degree"])
def test_a_source_is_drawn_in_proportion_to_the_law(law) -> None:
    seeds = np.arange(5)
    layer, graph = layer_of(partial(ladies, law=law), 1, seeds)
    dense = Adjacency(graph).ones.toarray()[seeds]
    law_of = {"count": dense.sum(0) ** 2, "degree": ((dense / dense.sum(1, keepdims=True)) ** 2).sum(0)}[law]
    counts = np.bincount(layer.columns % 8, minlength=8)
    possible = law_of > 0
    assert counts.sum() == BULK
    assert not counts[~possible].any()
    expected = BULK * law_of[possible] / law_of.sum()
    assert stats.chisquare(counts[possible], expected).pvalue > UNLIKELY
    np.testing.assert_array_equal(  # every edge from the source
        np.bincount(layer.matrix.indices, minlength=BULK), dense[:, layer.columns % 8].sum(0)
    )


def test_a_node_draws_each_subset_of_its_neighbors_equally_often() -> None:
    layer, _ = layer_of(graphsage, 2, np.array([1]))  # one of 4 neighbors
    assert layer.matrix.shape == (BULK, 2 * BULK)
    pairs = (layer.columns % 8).reshape(BULK, 2)
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > UNLIKELY


def test_a_sampler_of_another_law_is_noticed(monkeypatch) -> None:
    by_degree = {"count": matrix_sampling.OUR_LADIES["degree"]}
    monkeypatch.setattr(matrix_sampling, "OUR_LADIES", by_degree)
    assert not matrix_sampling.compare_draws(ARGS, Figures(ARGS))
