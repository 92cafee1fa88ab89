"""PyG's NegativeSampling with random numbers of a step of an epoch. Made by loaders of datasets."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import NegativeSampling

from gids.cuda import on_host

_COUNTERS = {"dst": 1, "src": 2}
"""Words of a counter that no other random numbers of an epoch have."""
_TRIALS = 6
"""As in PyG: a negative that is later than its seed edge is drawn again this often at most."""


class StepNegatives(NegativeSampling):  # type: ignore[misc]  # PyG is not typed
    """The negatives of one step. Ranks that share a step draw those of all its edges, and take their own.

    numbers: seed, epoch, step. first: position of this rank's first seed edge among those of the step.
    """

    def __init__(self, negatives: NegativeSampling, numbers: tuple[int, int, int], first: int) -> None:
        super().__init__(negatives.mode, negatives.amount, negatives.src_weight, negatives.dst_weight)
        self._numbers, self._first = numbers, first
        self._generators: dict[str, np.random.Generator] = {}
        self._edge_count: int | None = None  # of seed edges with trees
        self._edge_times: torch.Tensor | None = None
        self._node_times: dict[str, torch.Tensor | None] = {}  # by end

    def in_trees(
        self, count: int, times: torch.Tensor | None, src_times: Any = None, dst_times: Any = None
    ) -> StepNegatives:
        """The negatives of seed edges with trees: negative k belongs to seed edge k % count.

        times: int64[count], of the seed edges. src_times, dst_times: int64[nodes], if nodes have times. Then
        a negative is not later than its seed edge; if none is found, it is the earliest node.
        """
        made = copy.copy(self)
        made._edge_count, made._edge_times = count, times
        made._node_times = {"src": src_times, "dst": dst_times}
        return made

    def sample(self, num_samples: int, endpoint: str, num_nodes: int | None = None) -> torch.Tensor:
        """int64[num_samples]: nodes, uniform or by weight."""
        if self._edge_count is not None:
            return torch.from_numpy(self._in_trees(self._edge_count, num_samples, endpoint, num_nodes))
        passed = 0
        if endpoint not in self._generators:
            self._generators[endpoint] = self._generator(endpoint)
            passed = int(self._first * self.amount)
        drawn = self._draw(self._generators[endpoint], endpoint, num_nodes, passed + num_samples)
        return torch.from_numpy(drawn[passed:])

    def _in_trees(
        self, edge_count: int, num_samples: int, endpoint: str, num_nodes: int | None
    ) -> np.ndarray:
        per_edge, negatives = math.ceil(self.amount), np.arange(num_samples)
        edges = negatives % edge_count
        places = (self._first + edges) * per_edge + negatives // edge_count  # in the draws of all ranks
        times = self._node_times[endpoint]
        count = (self._first + edge_count) * per_edge
        drawn: np.ndarray = self._draw(self._generator(endpoint), endpoint, num_nodes, count)[places]
        if times is None or self._edge_times is None:
            return drawn
        latest = self._edge_times.numpy()[edges]
        for trial in range(1, _TRIALS):
            late = np.flatnonzero(times.numpy()[drawn] > latest)
            if not len(late):
                return drawn
            again = self._draw(self._generator(endpoint, trial), endpoint, num_nodes, count)
            drawn[late] = again[places[late]]
        drawn[times.numpy()[drawn] > latest] = int(times.argmin())
        return drawn

    def _generator(self, endpoint: str, trial: int = 0) -> np.random.Generator:
        seed, epoch, step = self._numbers
        key = np.array([seed, epoch], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, trial, step, _COUNTERS[endpoint]]))

    def _draw(
        self, generator: np.random.Generator, endpoint: str, num_nodes: int | None, count: int
    ) -> np.ndarray:
        """int64[count]: nodes, uniform or by weight."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            assert num_nodes is not None
            return generator.integers(0, num_nodes, count)
        sums = on_host(weight.detach()).double().cumsum(0).numpy()
        places = generator.random(count) * sums[-1]
        last = int(np.searchsorted(sums, sums[-1]))  # with a weight; rounding may lead past it
        nodes: np.ndarray = np.minimum(np.searchsorted(sums, places, side="right"), last)
        return nodes.astype(np.int64, copy=False)


def check_negatives(negatives: NegativeSampling | None, num_src: int, num_dst: int) -> None:
    """Raise ValueError for weights that are not one number of 0 or more for each node."""
    if negatives is None:
        return
    for name, weight, count in (
        ("src_weight", negatives.src_weight, num_src),
        ("dst_weight", negatives.dst_weight, num_dst),
    ):
        if weight is None:
            continue
        if weight.shape != (count,):
            raise ValueError(
                f"{name} of neg_sampling has shape {list(weight.shape)}; give one number for each of the "
                f"{count} nodes"
            )
        if not (weight.min() >= 0 and weight.sum() > 0):
            raise ValueError(f"{name} of neg_sampling must be 0 or more, and not all 0")
