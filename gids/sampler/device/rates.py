"""Neighbor's weights and masks for a device. Made by DeviceSampler.

The PinnedGraph keeps weights beside the topology. Masks are on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gids.cuda import Argument, Device
from gids.sampler.topology import Topology

_NOTHING = 0
"""A null pointer."""


@dataclass(frozen=True, eq=False)
class Rates:
    """The rates at which the edges of a relation are drawn.

    weights: the address of float32[num_edges] (0: all weights are 1). some_zero: whether some weights are 0.
    near: uint8[ceil(num_src / 8)] on the device, one bit per source; edges from these sources are drawn
    `factor` times as often. weighted: whether blocks have weights.
    """

    weights: int
    some_zero: bool
    near: torch.Tensor | None
    factor: float
    weighted: bool

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of kernels."""
        near: Argument = _NOTHING if self.near is None else self.near
        return self.weights, near, np.float32(self.factor)


class DeviceRates:
    """The rates of one sampler. The values of its weights and masks do not change, so they are copied once.

    What is known of an array is forgotten with it: the next array may get the same id.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._some_zero: dict[int, bool] = {}  # by id
        self._masks: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Device memory of the masks."""
        return sum(mask.nbytes for mask in list(self._masks.values()))

    def of(
        self,
        topology: Topology,
        weights: Sequence[np.ndarray | None],
        masks: Sequence[np.ndarray | None],
        factor: float,
        weigh_near: bool,
    ) -> list[Rates | None]:
        """The rates by relation; None for uniform draws. weights: float32[num_edges] by relation, or empty.
        masks, factor, weigh_near: from LocalityBias.of. Raises as PinnedGraph does.
        """
        rates: list[Rates | None] = []
        for r, pinned in enumerate(topology.pinned):
            of_edges, mask = weights[r] if weights else None, masks[r] if masks else None
            if of_edges is None and mask is None:
                rates.append(None)
                continue
            address = _NOTHING if of_edges is None else pinned.array(of_edges, "weights")
            some_zero = of_edges is not None and self._has_zero(of_edges)
            near = None if mask is None else self._on_device(mask)
            rates.append(Rates(address, some_zero, near, factor, near is None or weigh_near))
        return rates

    def _has_zero(self, weights: np.ndarray) -> bool:
        if id(weights) not in self._some_zero:
            self._some_zero[id(weights)] = not weights.all()
            weakref.finalize(weights, _forget, weakref.ref(self), id(weights))
        return self._some_zero[id(weights)]

    def _on_device(self, mask: np.ndarray) -> torch.Tensor:
        if id(mask) not in self._masks:
            copy = self._device.empty(len(mask), torch.uint8)
            copy.copy_(torch.from_numpy(mask))
            self._device.current_stream().synchronize()  # before another stream reads it
            self._masks[id(mask)] = copy
            weakref.finalize(mask, _forget, weakref.ref(self), id(mask))
        return self._masks[id(mask)]


def _forget(rates: weakref.ref[DeviceRates], key: int) -> None:
    if (known := rates()) is not None:
        known._some_zero.pop(key, None)
        known._masks.pop(key, None)
