"""The time that a device works on a stream: by the device's clock if it has one, else by the host's.

Called by the GPU benchmarks, whose code the tests run on an emulated device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gids.cuda import Device, Stream

_AHEAD_CYCLES = 2_000_000
"""About a millisecond, in which the host enqueues the measured work."""


def device_seconds(device: Device, stream: Stream, work: Callable[[], object]) -> float:
    """Run work, which enqueues on stream; the seconds from its first kernel to its last. Blocks.

    Inside, stream is torch's current one. Work must not wait for the device, or the host's time counts too.
    """
    with device.use(stream):
        stream.synchronize()
        if device.torch_device.type != "cuda":
            begun = time.perf_counter()
            work()
            stream.synchronize()
            return time.perf_counter() - begun
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)
        first.record()
        work()
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def host_seconds(stream: Stream, work: Callable[[], object]) -> float:
    """Run work; the seconds until what it enqueued on stream is done. Blocks."""
    stream.synchronize()
    begun = time.perf_counter()
    work()
    stream.synchronize()
    return time.perf_counter() - begun
