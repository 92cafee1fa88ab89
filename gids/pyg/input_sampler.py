"""InputSampler: samples inputs of PyG for a gids loader, by any sampler of PyG. Made by DatasetLoader."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput

from gids.cuda import on_host
from gids.pyg.hops import HopMinibatch
from gids.pyg.inputs import Inputs
from gids.pyg.negatives import StepNegatives
from gids.pyg.neighbor_sampler import NeighborSampler
from gids.pyg.outputs import Output, minibatch_of, output_of
from gids.sampler import Topology
from gids.sampler.layered import LayeredSampler, array_digest


class InputSampler:
    """A Sampler of gids.loader whose seeds are inputs of PyG.

    own: the sampler was made for the loader. It samples from the loader's topology, and its random numbers
    depend on (seed, epoch, step). Others have their own topology and random numbers. negatives: for edges.
    transform: is called with each SamplerOutput.

    Attributes: divisible: whether the edges of the topology may be divided among ranks.
    """

    def __init__(
        self,
        sampler: NeighborSampler | BaseSampler,
        negatives: NegativeSampling | None,
        transform: Callable[[Any], Any] | None,
        *,
        own: bool,
    ) -> None:
        self.sampler, self.negatives, self.transform = sampler, negatives, transform
        self._own = self.divisible = own

    def sample(
        self, topology: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """seeds: inputs of PyG, and the position of the first one among those of all ranks."""
        inputs, first = seeds
        negatives = None
        if self.negatives is not None:
            negatives = StepNegatives(self.negatives, (seed, epoch, step), first)
        output: Output
        if self._own:
            drawn = self.sampler.draw(topology, inputs, negatives, seed=seed, epoch=epoch, step=step)
            if self.transform is None and self.sampler.subgraph_type.value == "directional":
                return drawn
            output = self.sampler.finished(output_of(drawn))
        else:
            output = sample_from(self.sampler, inputs, negatives)
        return self.minibatch(output, topology, epoch=epoch, step=step)

    def minibatch(self, output: Output, topology: Topology, *, epoch: int = 0, step: int = 0) -> HopMinibatch:
        """The transformed output as a minibatch, without features."""
        if self.transform is not None:
            output = self.transform(output)
        device = torch.device("cpu") if topology.device is None else topology.device.torch_device
        permutation = self.sampler.edge_permutation
        return minibatch_of(output, topology, permutation, device, epoch=epoch, step=step)

    @property
    def layered(self) -> LayeredSampler | None:
        """The sampler of gids that it samples by."""
        return self.sampler.hops if self._own else None

    @property
    def nbytes(self) -> int:
        return self.sampler.hops.nbytes if self._own else 0

    @property
    def repeatable(self) -> bool:
        """See gids.sampler.Sampler. The weights of edges and negatives may change."""
        negatives = self.negatives
        weighted = negatives is not None and (
            negatives.src_weight is not None or negatives.dst_weight is not None
        )
        return self._own and self.transform is None and not weighted and self.sampler.hops.weights is None

    @property
    def without_repr(self) -> list[str]:
        """What minibatches depend on, and of which only the name is known."""
        parts = [self.transform, None if self._own else self.sampler]
        return [_name_of(p) for p in parts if p is not None and type(p).__repr__ in _NO_REPR]

    def __repr__(self) -> str:
        """Everything that minibatches depend on, as far as it is known."""
        negatives = "" if self.negatives is None else f", {_described(self.negatives)}"
        if self.transform is not None:
            negatives += f", transform={_name_of(self.transform)}"
        if not self._own:
            return f"{_name_of(self.sampler)}{negatives}"
        kind, tables = self.sampler.subgraph_type.value, self.sampler.tables_read
        read = f", tables={tables}" if tables else ""
        return f"{self.sampler.hops!r}{read}{negatives}{'' if kind == 'directional' else f', {kind}'}"


def sample_from(sampler: BaseSampler, inputs: Inputs, negatives: NegativeSampling | None) -> Output:
    """What a sampler of PyG samples by itself for these inputs."""
    if isinstance(inputs, NodeSamplerInput):
        return sampler.sample_from_nodes(inputs)
    return sampler.sample_from_edges(inputs, neg_sampling=negatives)


_NO_REPR: tuple[Any, ...] = (object.__repr__, FunctionType.__repr__, MethodType.__repr__)


def _name_of(part: Any) -> str:
    """The repr of a sampler or a transform, or else the name of its class, or its own."""
    if type(part).__repr__ not in _NO_REPR:
        return repr(part)
    return str(getattr(part, "__qualname__", type(part).__qualname__))


def _described(negatives: NegativeSampling) -> str:
    ends = {"src": negatives.src_weight, "dst": negatives.dst_weight}
    weights = {end: array_digest(on_host(w).numpy()) for end, w in ends.items() if w is not None}
    return f"negatives={negatives.mode.value} {negatives.amount} {weights}"
