"""EpochSampling: samples the minibatches of an epoch, and lists the rows that they read.

Made by EpochLoader for each epoch; the feature stream asks it for one minibatch after the other. NodeLoader
and EdgeLoader have a subclass each. Knows nothing of caches.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from gids.cuda import Device, Event, MadeOn
from gids.cuda.device import SAMPLING_PRIORITY, in_process
from gids.loader.queue import without_frames
from gids.loader.ranks import Ranks
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.forest import AnySeeds
from gids.sampler.layered import LayeredSampler
from gids.store import Table
from gids.store.names import Relation

IdsOf = Callable[[Minibatch], Mapping[str, torch.Tensor]]


class StepSeeds(NamedTuple):
    """The seeds of one step, as positions among a loader's seeds. part: the seeds of this rank."""

    of_all_ranks: np.ndarray
    part: slice

    @property
    def own(self) -> np.ndarray:
        return self.of_all_ranks[self.part]


@dataclass(frozen=True)
class EpochSeeds:
    """The seeds of an epoch by step. order: int64[seeds], positions, of all ranks. ids: by position, what
    users call the seeds; None: the positions.
    """

    order: np.ndarray
    batch_size: int
    ranks: Ranks
    ids: np.ndarray | None = None

    def at(self, step: int) -> StepSeeds:
        size = self.batch_size * self.ranks.world_size
        seeds = self.order[step * size : (step + 1) * size]
        return StepSeeds(seeds, self.ranks.part(len(seeds)))

    def named(self, positions: np.ndarray) -> torch.Tensor:
        """What users call the seeds at these positions: int64[n]."""
        return torch.from_numpy(positions if self.ids is None else self.ids[positions].astype(np.int64))


@runtime_checkable
class HasEdgeIds(Protocol):
    """A minibatch with its own list of a relation's edges, in addition to its blocks."""

    def edge_ids_of(self, relation: Relation) -> torch.Tensor: ...


class SampleStream:
    """The stream of a device on which minibatches are made, so that sampling does not wait for the kernels of
    training. On the CPU (device None) they are made directly.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.new_stream(SAMPLING_PRIORITY) if device is not None else None
        self._pid = os.getpid()
        self._finished: dict[int, MadeOn] = {}  # the ids of each minibatch that exists, by id()
        self._last: Event | None = None  # after the minibatch that was finished last

    def use(self) -> AbstractContextManager[object]:
        """A context: everything inside is made on this stream."""
        if self._device is None or self._stream is None:
            return nullcontext()
        return self._device.use(self._stream)

    def finished(self, minibatch: Minibatch, ids: IdsOf) -> None:
        """All work that makes this minibatch is enqueued, and that of the next one is not.

        ids: returns the ids that a minibatch reads, and enqueues what makes them.
        """
        if self._device is None or self._stream is None:
            return
        with self._device.use(self._stream):
            made = MadeOn(ids(minibatch), self._device, self._stream)
        self._finished[id(minibatch)], self._last = made, made.made
        weakref.finalize(minibatch, self._finished.pop, id(minibatch), None).atexit = False

    def ids(self, minibatch: Minibatch, ids: IdsOf) -> Mapping[str, torch.Tensor]:
        """The ids that a minibatch reads. On a device their reader waits for what makes them only.

        A copy of a minibatch, such as the spool's, is not known here: its ids also wait for what is sampled
        ahead.
        """
        if self._device is None or self._stream is None:
            return ids(minibatch)
        if (made := self._finished.get(id(minibatch))) is not None:
            return made
        with self._device.use(self._stream):
            return MadeOn(ids(minibatch), self._device, self._stream)

    def hand_over(self, minibatch: Minibatch) -> None:
        """Make a minibatch ready for torch's current stream, without a wait for those sampled after it."""
        if self._device is None or self._stream is None:
            return
        current = self._device.current_stream()
        made = self._finished.pop(id(minibatch), None)
        if (event := self._last if made is None else made.made) is not None:
            current.wait_event(event)
        for tensor in minibatch.tensors():
            self._device.hand_over(tensor, self._stream, current)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Called while a minibatch is made. Does not wait for the stream."""
        if self._device is None or values.device == self._device.torch_device:
            return values
        return values.pin_memory().to(self._device.torch_device, non_blocking=True)

    def synchronize(self) -> None:
        """Block until everything made on this stream is complete. Does nothing in a forked child."""
        if self._stream is not None:
            in_process(self._pid, self._stream.synchronize)


@dataclass(frozen=True)
class Epoch:
    """The plan of an epoch's sampling, for all kinds of loaders.

    steps: the steps to sample, up to the epoch's last. seed: of the random numbers. tables: the tables whose
    rows minibatches read. at_once: returns the number of minibatches to sample in the next call. sample:
    samples them.
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
    sample: Callable[..., list[Minibatch]]

    def numbers(self, step: int) -> tuple[int, int]:
        """The epoch and the step that the sampler gets."""
        if spans_epochs(self.sampler):
            return 0, self.number * self.steps.stop + step
        return self.number, step


class EpochSampling(ABC):
    """An epoch's minibatches, with labels and without features. Iterate over it once.

    It does not hold the loader, so that an open epoch does not either.
    """

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._types = {t.type for t in epoch.tables.values()}

    @abstractmethod
    def draw(self, step: int) -> tuple[AnySeeds, Callable[[Minibatch], Minibatch]]:
        """The seeds of a step, and a function that completes the minibatch that is sampled from them."""

    def sample(self, steps: range) -> list[Minibatch]:
        """The minibatches of successive steps."""
        epoch, drawn = self.epoch, [self.draw(step) for step in steps]
        seeds = [of_step for of_step, _ in drawn]
        number, first = epoch.numbers(steps.start)
        sampled = epoch.sample(
            epoch.sampler, epoch.topology, seeds, seed=epoch.seed, epoch=number, first_step=first
        )
        return [
            self._completed(minibatch, step, complete)
            for minibatch, step, (_, complete) in zip(sampled, steps, drawn, strict=True)
        ]

    def _completed(
        self, minibatch: Minibatch, step: int, complete: Callable[[Minibatch], Minibatch]
    ) -> Minibatch:
        minibatch.epoch, minibatch.step = self.epoch.number, step  # a sampler that spans epochs has others
        return complete(minibatch)

    def ids(self, minibatch: Minibatch) -> Mapping[str, torch.Tensor]:
        """The rows of each table that a minibatch reads."""
        return self.epoch.stream.ids(minibatch, self._ids)

    def _ids(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        of_types = {type_: _rows(minibatch, type_) for type_ in self._types}
        return {name: of_types[table.type] for name, table in self.epoch.tables.items()}

    def __iter__(self) -> Iterator[Minibatch]:
        """An error is raised after the minibatches before it, and is the end."""
        return self._one_ahead() if _can_start(self.epoch) else self._in_bulk()

    def _one_ahead(self) -> Iterator[Minibatch]:
        """On a device: enqueue the next minibatch before this one is returned, so that none is waited for."""
        steps = iter(self.epoch.steps)
        started = [self._start(step) for step in islice(steps, 1)]
        while started:
            with self.epoch.stream.use():
                minibatch = started.pop()()
            self.epoch.stream.finished(minibatch, self._ids)
            started += [self._start(step) for step in islice(steps, 1)]
            yield minibatch
            del minibatch  # its memory is the consumer's from here on

    def _start(self, step: int) -> Callable[[], Minibatch]:
        """Enqueue a step. Returns a function that returns its minibatch, or raises its error."""
        epoch = self.epoch
        assert isinstance(epoch.sampler, LayeredSampler)
        try:
            with epoch.stream.use():
                seeds, complete = self.draw(step)
                number, numbered = epoch.numbers(step)
                finish = epoch.sampler.start(
                    epoch.topology, seeds, seed=epoch.seed, epoch=number, step=numbered
                )
        except Exception as error:
            return partial(_fail, without_frames(error))
        return lambda: self._completed(finish(), step, complete)

    def _in_bulk(self) -> Iterator[Minibatch]:
        steps, count, one_by_one = self.epoch.steps, 1, False  # the first minibatch waits for no other
        minibatch_bytes = 0
        while steps:
            try:
                with self.epoch.stream.use():
                    made = deque(self.sample(steps[:count]))
                for minibatch in made:
                    self.epoch.stream.finished(minibatch, self._ids)
            except Exception:
                if count == 1:
                    raise
                count, one_by_one = 1, True  # minibatches before the error come first, then the error
                continue
            steps = steps[count:]
            minibatch_bytes = minibatch_bytes or made[0].nbytes
            while made:
                yield made.popleft()  # from here on its memory belongs to the consumer
            count = 1 if one_by_one else self.epoch.at_once()
        if (sampler := layered_of(self.epoch.sampler)) is not None:
            sampler.free_scratch(minibatch_bytes)


def layered_of(sampler: Sampler) -> LayeredSampler | None:
    """The sampler of gids that this one is, or samples by; None if there is none."""
    layered = getattr(sampler, "layered", sampler)
    return layered if isinstance(layered, LayeredSampler) else None


def spans_epochs(sampler: Sampler) -> bool:
    """See Sampler."""
    return bool(getattr(sampler, "spans_epochs", False))


def _can_start(epoch: Epoch) -> bool:
    """Whether the sampler can enqueue a minibatch without waiting for it: gids' own, on a device."""
    own = isinstance(epoch.sampler, LayeredSampler) and type(epoch.sampler).sample is LayeredSampler.sample
    return own and epoch.topology.device is not None


def _fail(error: Exception) -> Minibatch:
    raise error


def sample_steps(
    sampler: Sampler, topology: Topology, seeds: Sequence[AnySeeds], *, seed: int, epoch: int, first_step: int
) -> list[Minibatch]:
    """The minibatches of successive steps, in one call if the sampler can do that."""
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
