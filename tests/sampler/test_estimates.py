"""Sums over all neighbors are estimated without bias by the weights of every sampler. Seeds are fixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import distinct_graph
from scipy import stats

from gids.sampler import Labor, Ladies, LocalityBias, Neighbor
from gids.sampler.layered import LayeredSampler

UNLIKELY = 1e-3  # one correct sampler in a thousand fails; these seeds do not
GRAPH = distinct_graph(60, 90, (1, 40), seed=1)
_RNG = np.random.default_rng(4)
WEIGHTS: dict[str, Any] = {"weights": _RNG.exponential(1, GRAPH.num_edges) + 0.3}
LOCALITY: dict[str, Any] = {"locality": LocalityBias({"a": _RNG.random(90) < 0.3}, 4, weights=True)}
SAMPLERS: dict[str, LayeredSampler] = {
    "weights": Neighbor([5], threads=1, **WEIGHTS),
    "weights, replaced": Neighbor([5], threads=1, replace=True, **WEIGHTS),
    "weights, dependent": Neighbor([5], threads=1, batch_dependency=8, **WEIGHTS),
    "locality": Neighbor([5], threads=1, **LOCALITY),
    "locality, replaced": Neighbor([5], threads=1, replace=True, **LOCALITY),
    "locality, dependent": Neighbor([5], threads=1, batch_dependency=8, **LOCALITY),
    "locality and weights": Neighbor([5], threads=1, **LOCALITY, **WEIGHTS),
    **{
        f"labor-{times}, fixed count {fixed}": Labor(
            [4], threads=1, importance_sampling=times, fixed_count=fixed
        )
        for times in (0, 1, -1)
        for fixed in (False, True)
    },
    "ladies": Ladies([25], threads=1),
    "poisson ladies": Ladies([25], threads=1, poisson=True),
    "distinct ladies": Ladies([25], threads=1, replace=False),
    "ladies by count": Ladies([25], threads=1, law="count"),
    "poisson ladies by count": Ladies([25], threads=1, poisson=True, law="count"),
    "distinct ladies by count": Ladies([25], threads=1, replace=False, law="count"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_sums_are_estimated_without_bias(kind: str) -> None:
    steps, nodes = 2000, GRAPH.num_dst
    x = np.random.default_rng(4).normal(2, 1, GRAPH.num_src)
    exact = np.add.reduceat(x[GRAPH.indices], GRAPH.indptr[:-1])
    estimates = np.empty((steps, nodes))
    for step in range(steps):  # so far apart that none depends on another
        minibatch = SAMPLERS[kind].sample([GRAPH], {"b": torch.arange(nodes)}, seed=3, step=step * 17)
        [block] = minibatch.blocks[0].values()  # type: ignore[union-attr]
        values = block.weights.numpy() * x[GRAPH.indices[block.positions.numpy()]]
        estimates[step] = np.bincount(np.repeat(np.arange(nodes), block.indptr.diff()), values, nodes)
    spread = estimates.std(0, ddof=1) / np.sqrt(steps)
    certain = spread < 1e-6  # the node takes all of its neighbors
    np.testing.assert_allclose(estimates.mean(0)[certain], exact[certain], rtol=1e-5)
    assert certain.sum() < nodes / 3
    z = (estimates.mean(0) - exact)[~certain] / spread[~certain]
    assert np.abs(z).max() < stats.norm.isf(UNLIKELY / len(z)), z
