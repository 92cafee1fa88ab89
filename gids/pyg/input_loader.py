"""InputLoader: epochs over inputs of PyG's samplers, with features from a dataset on disk.

Made by NeighborLoader and LinkNeighborLoader. It does for them what NodeLoader and EdgeLoader do for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput

from gids.cuda import on_host
from gids.loader.epoch_loader import EpochLoader
from gids.loader.ranks import EpochSeeds, StepSeeds
from gids.loader.row_source import RowSource
from gids.loader.sampling import Epoch, EpochSampling
from gids.loader.tables import Tables
from gids.pyg.hops import HopMinibatch
from gids.pyg.inputs import Inputs, count_of, hash_inputs
from gids.pyg.negatives import StepNegatives
from gids.pyg.neighbor_sampler import NeighborSampler
from gids.pyg.outputs import Output, minibatch_of, output_of
from gids.sampler import Minibatch, Topology
from gids.sampler.layered import array_digest
from gids.sampler.minibatch import PerType


class InputSampler:
    """Samples inputs of PyG for a gids loader, by any sampler of PyG. A Sampler of gids.loader.

    own: the sampler was made for the loader. It samples from the loader's topology, and its random numbers
    depend on (seed, epoch, step). Others have their own topology and random numbers. negatives: for edges.
    transform: is called with each SamplerOutput.
    """

    def __init__(
        self,
        sampler: NeighborSampler | BaseSampler,
        negatives: NegativeSampling | None,
        transform: Callable[[Any], Any] | None,
        *,
        own: bool,
    ) -> None:
        self.sampler, self.negatives, self.transform, self._own = sampler, negatives, transform, own

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
        elif isinstance(inputs, NodeSamplerInput):
            output = self.sampler.sample_from_nodes(inputs)
        else:
            output = self.sampler.sample_from_edges(inputs, neg_sampling=negatives)
        return self.minibatch(output, topology, epoch=epoch, step=step)

    def minibatch(self, output: Output, topology: Topology, *, epoch: int = 0, step: int = 0) -> HopMinibatch:
        """The transformed output as a minibatch, without features."""
        if self.transform is not None:
            output = self.transform(output)
        device = torch.device("cpu") if topology.device is None else topology.device.torch_device
        permutation = self.sampler.edge_permutation
        return minibatch_of(output, topology, permutation, device, epoch=epoch, step=step)

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
    def by_layers(self) -> bool:
        """As HopSampler's."""
        return self._own and self.sampler.hops.by_layers

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


class InputLoader(EpochLoader):
    """Minibatches for inputs of PyG: HopMinibatches with features, labels of all nodes, and metadata of PyG.

    inputs: the seeds. order: in place of shuffle, positions of each epoch's seeds, or lists of these for each
    minibatch if batch_size is None; it is iterated over once an epoch, and the ranks do not share it.
    Arguments and errors are otherwise as in gids.NodeLoader.
    """

    def __init__(
        self,
        source: RowSource,
        topology: Topology,
        inputs: Inputs,
        sampler: InputSampler,
        *,
        order: Iterable[Any] | None,
        tables: Tables,
        labels: bool,
        batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int | None,
        world_size: int | None,
        device: str | torch.device,
        topology_on: str,
        dtype: torch.dtype | None,
        minibatch_rows: int | Mapping[str, int] | None,
    ) -> None:
        super().__init__(
            source,
            sampler,
            batch_size=1 if batch_size is None else batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self.inputs, self._given_order, self._in_lists = inputs, order, batch_size is None
        self._labels = {
            t: self.store.labels[t] for t in topology.node_types if labels and t in self.store.labels
        }
        self._open(topology, tables, device, topology_on, dtype, minibatch_rows)

    @property
    def topology(self) -> Topology:
        return self._topology

    def _compared(self) -> dict[str, Any]:
        return super()._compared() | {"labels": list(self._labels)}

    @property
    def _seed_count(self) -> int:
        return count_of(self.inputs) if self._given_order is None else len(self._given_order)  # type: ignore[arg-type]

    def _hash_seeds(self, update: Callable[[Any], None]) -> None:
        hash_inputs(self.inputs, update)

    def _sampling(self, epoch: Epoch) -> EpochSampling:
        return _InputSampling(epoch, self.inputs, self._labels)

    def _seeds_of(self, epoch: int) -> EpochSeeds:
        if self._given_order is None:
            return super()._seeds_of(epoch)
        given = [_positions(item) for item in self._given_order]
        order = np.concatenate([np.empty(0, np.int64), *given])
        if len(given) != self._seed_count:
            raise ValueError(f"the sampler yields {len(given)} items, and its length is {self._seed_count}")
        if not self._in_lists and len(order) != len(given):
            raise ValueError(
                f"the sampler yields lists, {len(order)} positions in {len(given)} items: give it as "
                "batch_sampler=, or give batch_size=None"
            )
        count = count_of(self.inputs)
        if len(order) and not (order.min() >= 0 and order.max() < count):
            raise IndexError(
                f"the sampler yields positions from {order.min()} to {order.max()}; there are {count} seeds"
            )
        if self._in_lists:
            return _Lists(order, self.batch_size, self._ranks, given)
        return EpochSeeds(order, self.batch_size, self._ranks)

    @property
    def _repeatable(self) -> bool:
        return self._given_order is None and super()._repeatable

    @property
    def labels(self) -> Mapping[str, torch.Tensor]:
        """By node type, of all nodes."""
        return self._labels

    def state_dict(self) -> dict[str, Any]:
        self._refuse_given_order("state_dict() cannot save")
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._refuse_given_order("load_state_dict() cannot set")
        super().load_state_dict(state)

    def _refuse_given_order(self, what: str) -> None:
        if self._given_order is not None:
            raise ValueError(f"{what} the position of sampler= or batch_sampler=: use shuffle= instead")


class _Lists(EpochSeeds):
    """Seeds of an epoch whose minibatches are given as lists."""

    def __init__(self, order: np.ndarray, batch_size: int, ranks: Any, lists: Sequence[np.ndarray]) -> None:
        super().__init__(order, batch_size, ranks)
        object.__setattr__(self, "_lists", lists)

    def at(self, step: int) -> StepSeeds:
        found: np.ndarray = self.__dict__["_lists"][step]
        return StepSeeds(found, slice(0, len(found)))


class _InputSampling(EpochSampling):
    def __init__(self, epoch: Epoch, inputs: Inputs, labels: Mapping[str, torch.Tensor]) -> None:
        super().__init__(epoch)
        self._inputs, self._labels = inputs, labels

    def draw(self, step: int) -> tuple[PerType, Callable[[Minibatch], Minibatch]]:
        seeds = self.epoch.seeds.at(step)
        given: Any = (self._inputs[torch.from_numpy(seeds.own)], seeds.part.start)
        return given, partial(add_labels, labels=self._labels, to_device=self.epoch.stream.to_device)


def add_labels(
    minibatch: Minibatch,
    labels: Mapping[str, torch.Tensor],
    to_device: Callable[[torch.Tensor], torch.Tensor],
) -> Minibatch:
    """Give a minibatch the labels of its nodes."""
    nodes = minibatch.input_nodes
    if isinstance(nodes, dict):
        minibatch.labels = {t: to_device(of[on_host(nodes[t])]) for t, of in labels.items()} or None
    elif labels:
        minibatch.labels = to_device(next(iter(labels.values()))[on_host(nodes)])
    return minibatch


def _positions(item: Any) -> np.ndarray:
    """What a sampler yields, a position or several: int64[n]."""
    positions = np.atleast_1d(np.asarray(item))
    if len(positions) and positions.dtype.kind not in "iu":
        raise TypeError(f"the sampler yields {item!r}: it must yield whole numbers, the positions of seeds")
    return positions.astype(np.int64, copy=False)


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
