"""Where a NodeLoader's minibatches are sampled. Knows streams and nothing of sampling. Made by NodeLoader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gids.cuda import Device
from gids.sampler import Minibatch


class SampleStream:
    """On the CPU minibatches are made in place. On a device they are made on this stream, so that sampling
    waits for none of the training's kernels, and then handed to the stream that uses them.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.new_stream() if device is not None else None

    def make(self, make: Callable[[range], Sequence[Minibatch]], steps: range) -> Sequence[Minibatch]:
        """Minibatches, ready for torch's current stream."""
        if self._device is None or self._stream is None:
            return make(steps)
        with self._device.use(self._stream):
            minibatches = make(steps)
        for minibatch in minibatches:
            self.hand_over(minibatch)
        return minibatches

    def hand_over(self, minibatch: Minibatch) -> None:
        """Ready for torch's current stream, which may have changed since the minibatch was made."""
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
