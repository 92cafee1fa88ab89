"""Weights and masks of Neighbor where a device reads them. Made by DeviceSampler.

Weights lie beside the topology, whose PinnedGraph keeps them; masks on the device.
"""

from __future__ import annotations

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
    """How readily each edge of a relation is drawn.

    weights: the address of float32[num_edges], 0: all are 1. some_zero: whether there are weights of 0. near:
    a bit for each source, uint8[ceil(num_src / 8)] on the device; edges from those are drawn `factor` times
    as readily.
    """

    weights: int
    some_zero: bool
    near: torch.Tensor | None
    factor: float

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """As kernels take them."""
        near: Argument = _NOTHING if self.near is None else self.near
        return self.weights, near, np.float32(self.factor)


class DeviceRates:
    """Those of one sampler, whose weights and masks do not change: they are looked at and copied once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._some_zero: dict[int, bool] = {}  # by id: the sampler keeps these arrays
        self._masks: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(mask.nbytes for mask in self._masks.values())

    def of(
        self,
        topology: Topology,
        weights: Sequence[np.ndarray | None],
        masks: Sequence[np.ndarray | None],
        factor: float,
    ) -> list[Rates | None]:
        """By relation; None where all edges are alike. weights: float32[num_edges], by relation, or none at
        all; masks, factor: as LocalityBias.of gives them. Raises as PinnedGraph does.
        """
        given = zip(
            topology.pinned,
            weights or [None] * len(topology.pinned),
            masks or [None] * len(topology.pinned),
            strict=True,
        )
        return [
            None
            if of_edges is None and mask is None
            else Rates(
                _NOTHING if of_edges is None else pinned.edge_weights(of_edges),
                of_edges is not None and self._has_zero(of_edges),
                None if mask is None else self._on_device(mask),
                factor,
            )
            for pinned, of_edges, mask in given
        ]

    def _has_zero(self, weights: np.ndarray) -> bool:
        if id(weights) not in self._some_zero:
            self._some_zero[id(weights)] = not weights.all()
        return self._some_zero[id(weights)]

    def _on_device(self, mask: np.ndarray) -> torch.Tensor:
        if id(mask) not in self._masks:
            copy = self._device.empty(len(mask), torch.uint8)
            copy.copy_(torch.from_numpy(mask))
            self._device.current_stream().synchronize()  # before another stream reads it
            self._masks[id(mask)] = copy
        return self._masks[id(mask)]
