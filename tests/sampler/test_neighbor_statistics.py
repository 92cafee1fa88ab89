"""Neighbor sampling is uniform, and different draws are independent. Seeds are fixed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datasets import make_graph
from scipy import stats

from gids.sampler import Block, Neighbor

NODES = 20_000
UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not


def offsets(degree: int, fanout: int, *, step: int = 0, seed: int = 3) -> npt.NDArray[np.int64]:
    """[NODES, fanout]: which of its neighbors each node drew."""
    block = draw(degree, [fanout], step=step, seed=seed)[0]
    return block.positions.numpy().reshape(NODES, fanout) - np.arange(NODES)[:, None] * degree


def draw(degree: int, fanouts: list[int], *, step: int = 0, seed: int = 3) -> list[Block]:
    graph = make_graph(np.full(NODES, degree))
    return Neighbor(fanouts).sample(graph, torch.arange(NODES), seed=seed, step=step).blocks  # type: ignore[return-value]


def assert_equally_likely(outcomes: npt.NDArray[np.int64], kinds: int) -> None:
    """outcomes: each from 0 to kinds - 1."""
    p = stats.chisquare(np.bincount(outcomes, minlength=kinds)).pvalue
    assert p > UNLIKELY, p


@pytest.mark.parametrize(("degree", "fanout"), [(2, 1), (6, 2), (6, 3), (7, 4), (9, 8), (10, 2)])
def test_every_subset_is_equally_likely(degree: int, fanout: int) -> None:
    """This covers single neighbors and pairs."""
    chosen = np.sort(offsets(degree, fanout), axis=1)
    assert (np.diff(chosen, axis=1) > 0).all(), "no neighbor twice"
    assert chosen.min() >= 0
    assert chosen.max() < degree
    _, which = np.unique(chosen @ degree ** np.arange(fanout), return_inverse=True)
    assert_equally_likely(which, math.comb(degree, fanout))


@pytest.mark.parametrize(
    ("degree", "fanout"), [(33, 32), (100, 10), (400, 47), (300, 48), (200, 49), (90, 80)]
)
def test_every_neighbor_is_equally_likely(degree: int, fanout: int) -> None:
    chosen = offsets(degree, fanout)
    ordered = np.sort(chosen, axis=1)
    assert (np.diff(ordered, axis=1) > 0).all()
    counts = np.bincount(chosen.ravel(), minlength=degree)
    share = fanout / degree
    # Draws without replacement exclude each other: the counts' covariance has one eigenvalue, d - 1 times.
    variance = NODES * share * (1 - share) * degree / (degree - 1)
    statistic = float(((counts - NODES * share) ** 2).sum() / variance)
    p = stats.chi2.sf(statistic, degree - 1)
    assert UNLIKELY < p < 1 - UNLIKELY, p


@pytest.mark.parametrize("other", ["step", "seed", "node"])
def test_draws_of_different_nodes_steps_and_seeds_are_independent(other: str) -> None:
    first = offsets(7, 1)[:, 0]
    second = {
        "step": offsets(7, 1, step=1)[:, 0],
        "seed": offsets(7, 1, seed=4)[:, 0],
        "node": np.roll(first, 1),
    }[other]
    assert_equally_likely(first * 7 + second, 49)


def test_layers_are_independent() -> None:
    blocks = draw(7, [1, 1])
    near, far = (b.positions.numpy()[:NODES] - np.arange(NODES) * 7 for b in reversed(blocks))
    assert_equally_likely(near * 7 + far, 49)


def test_many_steps_of_one_node() -> None:
    graph = make_graph([11])
    sampler = Neighbor([2])
    drawn = [sampler.sample(graph, torch.zeros(1, dtype=torch.int64), step=s).blocks[0] for s in range(4000)]
    pairs = np.array([sorted(block.positions.tolist()) for block in drawn])  # type: ignore[union-attr]
    _, which = np.unique(pairs @ [1, 11], return_inverse=True)
    assert_equally_likely(which, math.comb(11, 2))
