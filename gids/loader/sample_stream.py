"""How a loader's minibatches are sampled: several in a call, and where.

Called by EpochLoader and its kinds. Knows nothing of what a seed is, and nothing of features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from gids.cuda import Device, MadeOn
from gids.loader.ranks import EpochSeeds, StepSeeds
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.layered import LayeredSampler
from gids.sampler.minibatch import PerType

Draw = Callable[[Sequence[StepSeeds], int, int], list[Minibatch]]
"""(each step's seeds, epoch, first step) -> minibatches, with labels and without features."""


class SampleStream:
    """On the CPU minibatches are made in place. On a device they are made on this stream, so that sampling
    waits for none of the training's kernels, and then handed to the stream that uses them.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.new_stream() if device is not None else None

    def make(self, make: Callable[[range], Sequence[Minibatch]], steps: range) -> Sequence[Minibatch]:
        """Minibatches, to be handed over to the stream that uses them."""
        if self._device is None or self._stream is None:
            return make(steps)
        with self._device.use(self._stream):
            return make(steps)

    def hand_over(self, minibatch: Minibatch) -> None:
        """Make it ready for torch's current stream."""
        if self._device is None or self._stream is None:
            return
        current = self._device.current_stream()
        current.wait_stream(self._stream)
        for tensor in minibatch.tensors():
            self._device.hand_over(tensor, self._stream, current)

    def ids(
        self, of: Callable[[Minibatch], Mapping[str, torch.Tensor]], minibatch: Minibatch
    ) -> Mapping[str, torch.Tensor]:
        """The ids that it reads: looked up on this stream, so that whoever reads them waits for no other."""
        if self._device is None or self._stream is None:
            return of(minibatch)
        with self._device.use(self._stream):
            return MadeOn(of(minibatch), self._stream)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Called while a minibatch is made."""
        return values if self._device is None else values.to(self._device.torch_device)

    def synchronize(self) -> None:
        """Block until all that was made here is complete."""
        if self._stream is not None:
            self._stream.synchronize()


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


def minibatches_of_epoch(
    draw: Draw,
    seeds: EpochSeeds,
    epoch: int,
    steps: range,
    stream: SampleStream,
    at_once: Callable[[], int],
) -> Iterator[Minibatch]:
    """The minibatches of an epoch's steps. at_once: how many minibatches a call makes."""

    def minibatches(chosen: range) -> list[Minibatch]:
        return draw([seeds.at(step) for step in chosen], epoch, chosen.start)

    count, one_by_one = 1, False  # the first one waits for no other
    while steps:
        try:
            made = deque(stream.make(minibatches, steps[:count]))
        except Exception:
            if count == 1:
                raise
            count, one_by_one = 1, True  # it is raised at its turn, after those that are sound
            continue
        steps = steps[count:]
        while made:
            yield made.popleft()  # whose memory is the consumer's from here on
        count = 1 if one_by_one else at_once()
