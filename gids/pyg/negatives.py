"""PyG's NegativeSampling with random numbers of a step of an epoch. Made by loaders of datasets."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.sampler import NegativeSampling

_COUNTERS = {"dst": 1, "src": 2}
"""Words of a counter that no other random numbers of an epoch have."""


class StepNegatives(NegativeSampling):  # type: ignore[misc]  # PyG is not typed
    """The negatives of one step. Ranks that share a step draw those of all its edges, and take their own.

    numbers: seed, epoch, step. first: position of this rank's first seed edge among those of the step.
    """

    def __init__(self, given: NegativeSampling, numbers: tuple[int, int, int], first: int) -> None:
        super().__init__(given.mode, given.amount, given.src_weight, given.dst_weight)
        seed, epoch, step = numbers
        key = np.array([seed, epoch], np.uint64)
        self._first = int(first * self.amount)
        self._generators = {
            end: np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, word]))
            for end, word in _COUNTERS.items()
        }
        self._passed: set[str] = set()

    def sample(self, num_samples: int, endpoint: str, num_nodes: int | None = None) -> torch.Tensor:
        """int64[num_samples]: nodes, uniform or by weight."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        generator, passed = self._generators[endpoint], 0
        if endpoint not in self._passed:
            self._passed.add(endpoint)
            passed = self._first
        if weight is None:
            assert num_nodes is not None
            drawn = generator.integers(0, num_nodes, passed + num_samples)
        else:
            sums = weight.detach().cpu().double().cumsum(0).numpy()
            places = generator.random(passed + num_samples) * sums[-1]
            last = int(np.searchsorted(sums, sums[-1]))  # with a weight; rounding may lead past it
            drawn = np.minimum(np.searchsorted(sums, places, side="right"), last)
        return torch.from_numpy(drawn[passed:].astype(np.int64, copy=False))


def check_negatives(given: NegativeSampling | None, num_src: int, num_dst: int) -> None:
    """Raise ValueError for weights that are not one number of 0 or more for each node."""
    if given is None:
        return
    for name, weight, count in (
        ("src_weight", given.src_weight, num_src),
        ("dst_weight", given.dst_weight, num_dst),
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
