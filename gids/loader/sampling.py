"""EpochSampling: where an epoch's minibatches come from, and the rows that they read.

Made by EpochLoader for each epoch; the feature stream asks it for one minibatch after the other. NodeLoader and
EdgeLoader have a kind each. Knows nothing of caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from gids.cuda import Device, MadeOn
from gids.loader.ranks import EpochSeeds
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.layered import LayeredSampler
from gids.sampler.minibatch import PerType
from gids.store import Table
from gids.store.names import Relation


@runtime_checkable
class HasEdgeIds(Protocol):
    """A minibatch with its own list of a relation's edges, beside its blocks."""

    def edge_ids_of(self, relation: Relation) -> torch.Tensor: ...


class SampleStream:
    """The stream of a device on which minibatches are made, so that sampling does not wait for the training's
    kernels. On the CPU (device None) they are made in place.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.new_stream() if device is not None else None

    def use(self) -> AbstractContextManager[object]:
        """Make what follows on this stream."""
        if self._device is None or self._stream is None:
            return nullcontext()
        return self._device.use(self._stream)

    def made_here(self, ids: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Ids that were made on this stream, for a reader that waits for no other stream."""
        return ids if self._stream is None else MadeOn(ids, self._stream)

    def hand_over(self, minibatch: Minibatch) -> None:
        """Make a minibatch ready for torch's current stream."""
        if self._device is None or self._stream is None:
            return
        current = self._device.current_stream()
        current.wait_stream(self._stream)
        for tensor in minibatch.tensors():
            self._device.hand_over(tensor, self._stream, current)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Called while a minibatch is made."""
        return values if self._device is None else values.to(self._device.torch_device)

    def synchronize(self) -> None:
        """Block until all that was made here is complete."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class Epoch:
    """What the samplings of all loaders need to know. steps: those to sample. seed: of the random numbers.

    tables: whose rows minibatches read. at_once: minibatches that one call may sample, asked before each call.
    """

    number: int
    steps: range
    seeds: EpochSeeds
    topology: Topology
    sampler: Sampler
    seed: int
    tables: Mapping[str, Table]
    stream: SampleStream
    at_once: Callable[[], int]


class EpochSampling(ABC, Iterator[Minibatch]):
    """An iterator of an epoch's minibatches, with labels and without features. It does not hold the loader, so
    that an open epoch does not either.
    """

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._types = {t.type for t in epoch.tables.values()}
        self._left = epoch.steps
        self._made: deque[Minibatch] = deque()
        self._begun = False  # the first minibatch waits for no other
        self._one_by_one = False

    @abstractmethod
    def sample(self, steps: range) -> Sequence[Minibatch]:
        """The minibatches of successive steps."""

    def ids(self, minibatch: Minibatch) -> Mapping[str, torch.Tensor]:
        """The rows of each table that a minibatch reads."""
        with self.epoch.stream.use():
            of_types = {type_: _rows(minibatch, type_) for type_ in self._types}
            ids = {name: of_types[table.type] for name, table in self.epoch.tables.items()}
        return self.epoch.stream.made_here(ids)

    def __next__(self) -> Minibatch:
        while not self._made:
            if not self._left:
                raise StopIteration
            count = self.epoch.at_once() if self._begun and not self._one_by_one else 1
            try:
                with self.epoch.stream.use():
                    self._made.extend(self.sample(self._left[:count]))
            except Exception:
                if count == 1:
                    self._left = range(0)
                    raise
                self._one_by_one = True  # the sound minibatches come first, then the error, at its turn
                continue
            self._begun = True
            self._left = self._left[count:]
        return self._made.popleft()  # its memory is the consumer's from here on

    def close(self) -> None:
        """Sample no more."""
        self._left = range(0)
        self._made.clear()


def sample_steps(
    sampler: Sampler, topology: Topology, seeds: Sequence[PerType], *, seed: int, epoch: int, first_step: int
) -> list[Minibatch]:
    """The minibatches of successive steps, in one call where the sampler can."""
    if isinstance(sampler, LayeredSampler) and len(seeds) > 1:
        return sampler.sample_bulk(topology, seeds, seed=seed, epoch=epoch, first_step=first_step)
    return [
        sampler.sample(topology, of_step, seed=seed, epoch=epoch, step=step)
        for step, of_step in enumerate(seeds, first_step)
    ]


def _rows(minibatch: Minibatch, type_: str | Relation) -> torch.Tensor:
    """The rows that a minibatch reads of every table of a type."""
    if isinstance(type_, str):
        nodes = minibatch.input_nodes
        return nodes[type_] if isinstance(nodes, dict) else nodes
    if isinstance(minibatch, HasEdgeIds):
        return minibatch.edge_ids_of(type_)
    blocks = [layer[type_] if isinstance(layer, dict) else layer for layer in minibatch.blocks]
    return torch.cat([block.edge_ids for block in blocks])
