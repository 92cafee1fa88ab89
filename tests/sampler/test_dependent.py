"""Dependent minibatches: numbers change slowly. Nested ones, parts of a large one, have a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from every_sampler import assert_same_tensors
from sampling_model import make_graph
from scipy import stats

from gids import _core
from gids.sampler import Labor, Neighbor


def variates(step: int, kappa: int) -> np.ndarray:
    """The numbers of nodes 0, 1, … in [0, 1)."""
    out = np.empty(2000, np.uint64)
    _core.variates((3, 1, step), kappa, 0, 0, np.arange(2000), out)
    return out / 2.0**64


def test_numbers_change_gradually_from_one_group_to_the_next() -> None:
    """Numbers and their correlation equal the formula."""
    kappa = 8
    ends = [variates(group, 1) for group in (5, 6)]
    normal = [stats.norm.ppf(end) for end in ends]
    for i in (0, 1, 3, 7, 8):
        angle = i / kappa * math.pi / 2
        n = math.cos(angle) * normal[0] + math.sin(angle) * normal[1]
        np.testing.assert_allclose(variates(5 * kappa + i, kappa), stats.norm.cdf(n), atol=1e-12)


@pytest.mark.parametrize("kind", [Neighbor, Labor])
def test_the_larger_kappa_the_more_two_minibatches_share(kind: Any) -> None:
    """With 1 they are independent, with infinity all of an epoch are the same."""
    graph, shares = make_graph(np.full(3000, 60), seed=8), []
    sample = lambda sampler, **at: sampler.sample(graph, torch.arange(100), seed=0, **at)  # noqa: E731
    for kappa in (1, 4, 16, 64, math.inf):
        sampler = kind([5, 5], batch_dependency=kappa)
        one, other = (sample(sampler, step=s).blocks[1] for s in (0, 1))
        shares.append(len(np.intersect1d(one.positions, other.positions)) / one.num_edges)
    assert (np.diff(shares) > 0).all(), shares
    assert shares[0] < 0.15
    assert shares[-1] == 1
    assert_same_tensors(sample(kind([5, 5], batch_dependency=1), step=9), sample(kind([5, 5]), step=9))
    for endless in (sampler, kind([5, 5], batch_dependency=math.inf, nested=True)):
        first = sample(endless, epoch=2)
        assert_same_tensors(first, sample(endless, epoch=2, step=12345))
        assert first.input_nodes.tolist() != sample(endless, epoch=3).input_nodes.tolist()
