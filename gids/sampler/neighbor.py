"""Neighbor: neighbour sampling, by native threads or by GPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gids import _core
from gids.cuda import Device
from gids.sampler.layered import Fanout, LayeredSampler, Layers, Numbers
from gids.sampler.on_device import DeviceSampler
from gids.sampler.topology import Topology


class Neighbor(LayeredSampler):
    """Every node of a layer draws up to `fanout` in-edges by each relation, each as likely as the others.

    fanouts: one per layer, from the input layer to the output layer (as dgl.dataloading.NeighborSampler takes
    them: the last is that of the seeds). Each is a number, 1 or more, or -1 for all neighbours; or a
    dictionary with such a number for every relation, where 0 leaves the relation out. threads: on the CPU;
    None takes torch's.

    In a heterogeneous graph a node that any relation has found draws by every relation that ends in its type.
    Random numbers are counted, not drawn in turn: the minibatch depends on seeds, seed, epoch, step and
    graph, neither on threads nor on the device.
    """

    def __init__(self, fanouts: Sequence[Fanout], *, threads: int | None = None) -> None:
        super().__init__(fanouts, threads)
        self._devices: dict[Device, DeviceSampler] = {}

    @property
    def fanouts(self) -> list[Fanout]:
        return self._per_layer

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(d.nbytes for d in self._devices.values())

    def __repr__(self) -> str:
        return f"Neighbor({self.fanouts})"

    def _arguments(self) -> dict[str, Any]:
        return {"fanouts": self.fanouts, "threads": self.threads}

    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[Any],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> _core._Sampled:
        return host.neighbor(topology.native, seeds, fanouts, numbers)

    def _sample_on(
        self,
        device: Device,
        topology: Topology,
        seeds: list[torch.Tensor],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> Layers:
        if device not in self._devices:
            self._devices[device] = DeviceSampler(device)
        return self._devices[device].sample(topology, seeds, fanouts, numbers)
