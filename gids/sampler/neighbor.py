"""Neighbor: every node draws neighbours for itself, by native threads or by GPU kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.sampler.layered import Fanout, LayeredSampler, Layers, Numbers, check_dependency
from gids.sampler.topology import Topology
from gids.store.names import Relation, describe_type

Weights = torch.Tensor | np.ndarray
"""float[num_edges] in the order of graph.indices."""


class Neighbor(LayeredSampler):
    """Every node of a layer draws up to `fanout` in-edges by each relation, each as likely as the others.

    fanouts: one per layer, from the input layer to the output layer (as dgl.dataloading.NeighborSampler takes
    them: the last is that of the seeds). Each is a number, 1 or more, or -1 for all neighbours; or a
    dictionary with such a number for every relation, where 0 leaves the relation out.

    replace: draw with replacement, `fanout` edges of every node that has any; -1 takes all. weights: edges
    are drawn in proportion to theirs, those of weight 0 never: float[num_edges] on the CPU in the order of
    graph.indices, kept as float32; or a dictionary by relation, and relations that it lacks are drawn from
    uniformly. Blocks of relations with weights have `weights`, 1 / probability. batch_dependency: in how many
    minibatches the random numbers change wholly, 1 (each draws anew) or more, or math.inf (only from epoch to
    epoch); successive minibatches then read more of the same rows. threads: on the CPU; None takes torch's.

    In a heterogeneous graph a node that any relation has found draws by every relation that ends in its type.
    Random numbers are counted, not drawn in turn: the minibatch depends on seeds, seed, epoch, step and
    graph, neither on threads nor on the device. GPUs sample without replace, weights and batch_dependency.

    Raises TypeError for weights that are no floating-point numbers in one dimension, ValueError for weights
    that are negative or not finite, and for other arguments; sample() raises ValueError for weights that are
    not the graph's.
    """

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        *,
        replace: bool = False,
        weights: Weights | Mapping[Relation, Weights] | None = None,
        batch_dependency: float = 1,
        threads: int | None = None,
    ) -> None:
        super().__init__(fanouts, threads)
        self.replace, self.batch_dependency = bool(replace), batch_dependency
        self._kappa = check_dependency(batch_dependency)
        self._weights: np.ndarray | dict[Relation, np.ndarray] | None = None
        if isinstance(weights, Mapping):
            self._weights = {r: _check_weights(w, f" of {describe_type(r)}") for r, w in weights.items()}
        elif weights is not None:
            self._weights = _check_weights(weights, "")

    @property
    def fanouts(self) -> list[Fanout]:
        return self._per_layer

    def _arguments(self) -> dict[str, Any]:
        return {
            "fanouts": self.fanouts,
            "replace": self.replace,
            "weights": self._weights,
            "batch_dependency": self.batch_dependency,
            "threads": self.threads,
        }

    def _printed(self) -> dict[str, Any]:
        return self._arguments() | {"weights": self._weights_digest}

    @cached_property
    def _weights_digest(self) -> str | dict[Relation, str] | None:
        def digest(weights: np.ndarray) -> str:
            return f"{len(weights)} ({hashlib.blake2b(weights.data, digest_size=8).hexdigest()})"

        if isinstance(self._weights, dict):
            return {relation: digest(weights) for relation, weights in self._weights.items()}
        return None if self._weights is None else digest(self._weights)

    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[list[Any]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[_core._Sampled]:
        weights = self._weights_of(topology)
        return host.neighbor(topology.native, seeds, fanouts, numbers, self.replace, weights, self._kappa)

    def _weights_of(self, topology: Topology) -> list[np.ndarray | None]:
        """By relation."""
        given = self._weights
        if given is None:
            return []
        if isinstance(given, np.ndarray):
            if len(topology.relations) > 1:
                raise ValueError(
                    "weights is one tensor; give a dictionary by relation where there are several"
                )
            given = {topology.relations[0]: given}
        if unknown := [r for r in given if r not in topology.relations]:
            raise ValueError(f"weights names {unknown[0]!r}, and no graph has that relation")
        for graph in topology.graphs:
            if graph.relation in given and len(given[graph.relation]) != graph.num_edges:
                raise ValueError(
                    f"{len(given[graph.relation])} weights of {describe_type(graph.relation)}, which has "
                    f"{graph.num_edges} edges; give one for each, in the order of graph.indices"
                )
        return [given.get(relation) for relation in topology.relations]

    def _sample_on(
        self,
        device: Device,
        topology: Topology,
        seeds: list[torch.Tensor],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> Layers:
        if self.replace or self._weights is not None or self._kappa != 1:
            return super()._sample_on(device, topology, seeds, fanouts, numbers)
        return self._device_sampler(device).sample(topology, seeds, fanouts, numbers)


def _check_weights(given: Weights, of: str) -> np.ndarray:
    array = np.asarray(given.numpy() if isinstance(given, torch.Tensor) and not given.is_cuda else given)
    if array.dtype.kind != "f" or array.ndim != 1:
        raise TypeError(
            f"weights{of} are {array.dtype} of shape {array.shape}; give float[num_edges], on the CPU"
        )
    array = np.ascontiguousarray(array, np.float32)
    if len(array) and not (array.min() >= 0 and np.isfinite(array.max())):  # NaN fails the first
        at = int(np.argmax(~((array >= 0) & np.isfinite(array))))
        raise ValueError(f"weights{of}: weight {at} is {array[at]}; they must be 0 or more, and finite")
    return array
