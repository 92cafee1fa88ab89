"""Neighbor: every node draws neighbours for itself, by native threads or by GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.sampler.device.rates import Rates
from gids.sampler.device.sampling import Choice, Kind
from gids.sampler.layered import Fanout, LayeredSampler, Layers, Numbers, array_digest, check_dependency
from gids.sampler.locality import LocalityBias
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
    uniformly. locality: edges from nodes that a cache holds are drawn more readily (LocalityBias). Blocks of
    relations with weights or masks have `weights`, 1 / probability. threads: on the CPU; None takes torch's.

    batch_dependency: in how many minibatches the random numbers change wholly, 1 (each draws anew) or more,
    or math.inf (only from epoch to epoch); successive minibatches then read more of the same rows. nested:
    these minibatches are cut from a large one instead: all draw alike, and those of the next group anew.

    In a heterogeneous graph a node that any relation has found draws by every relation that ends in its type.
    Random numbers are counted, not drawn in turn: the minibatch depends on seeds, seed, epoch, step and
    graph, neither on threads nor on the device. For a GPU weights are copied beside the pinned
    topology, 4 bytes per edge, and masks to the device, when it samples first.

    Raises TypeError for weights that are no floating-point numbers in one dimension, ValueError for weights
    that are negative or not finite, and for other arguments; sample() raises ValueError for weights and
    masks that are not the graph's.
    """

    def __init__(
        self,
        fanouts: Sequence[Fanout],
        *,
        replace: bool = False,
        weights: Weights | Mapping[Relation, Weights] | None = None,
        locality: LocalityBias | None = None,
        batch_dependency: float = 1,
        nested: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(fanouts, threads)
        self.replace, self.batch_dependency, self.nested = bool(replace), batch_dependency, bool(nested)
        self._dependency = check_dependency(batch_dependency, self.nested)
        if locality is not None and not isinstance(locality, LocalityBias):
            raise TypeError(f"locality is {type(locality).__name__}; give a gids.sampler.LocalityBias")
        self.locality = locality
        self._weights: np.ndarray | dict[Relation, np.ndarray] | None = None
        if isinstance(weights, Mapping):
            self._weights = {r: _check_weights(w, f" of {describe_type(r)}") for r, w in weights.items()}
        elif weights is not None:
            self._weights = _check_weights(weights, "")
        given = self._weights.values() if isinstance(self._weights, dict) else [self._weights]
        most = max((float(w.max(initial=0)) for w in given if w is not None), default=0)
        if locality is not None and most * locality.factor > float(np.finfo(np.float32).max):
            raise ValueError(
                f"weights up to {most:g} times the factor {locality.factor:g} are beyond float32; scale them "
                "down"
            )

    @property
    def fanouts(self) -> list[Fanout]:
        return self._per_layer

    def _arguments(self) -> dict[str, Any]:
        return {
            "fanouts": self.fanouts,
            "replace": self.replace,
            "weights": self._weights,
            "locality": self.locality,
            "batch_dependency": self.batch_dependency,
            "nested": self.nested,
            "threads": self.threads,
        }

    def _printed(self) -> dict[str, Any]:
        return self._arguments() | {"weights": self._weights_digest}

    @cached_property
    def _weights_digest(self) -> str | dict[Relation, str] | None:
        if isinstance(self._weights, dict):
            return {relation: array_digest(weights) for relation, weights in self._weights.items()}
        return None if self._weights is None else array_digest(self._weights)

    def _call(
        self,
        host: _core.HostSampler,
        topology: Topology,
        seeds: list[list[Any]],
        fanouts: list[list[int]],
        numbers: Numbers,
    ) -> list[_core._Sampled]:
        return host.neighbor(
            topology.native,
            seeds,
            fanouts,
            numbers,
            self.replace,
            self._weights_of(topology),
            self._dependency,
            *self._masks_of(topology),
        )

    def _masks_of(self, topology: Topology) -> tuple[list[np.ndarray | None], float]:
        """By relation, and the factor."""
        return ([], 1.0) if self.locality is None else self.locality.of(topology)

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
        sampler = self._device_sampler(device)
        rates: list[Rates | None] = []
        weights, (masks, factor) = self._weights_of(topology), self._masks_of(topology)
        if weights or masks:
            topology.check_open()
            rates = sampler.rates.of(topology, weights, masks, factor)
        kind: Kind = "least" if self._dependency.gradual else "uniform"
        choice = Choice("replaced" if self.replace else kind, self._dependency, rates=rates)
        return sampler.sample(topology, seeds, fanouts, numbers, choice)


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
