"""Pinned host memory of minibatches that training copies to a GPU itself: pin_memory=True of the loaders.

Torch's host allocator owns the memory, because it knows the copies in flight: it does not hand out again what
a tensor.to("cuda", non_blocking=True) still reads. Buffers of gids' own, registered with the driver, would be
filled again under such a copy.
"""

from __future__ import annotations

import torch


def check_pinning(pin_memory: bool, device: str | torch.device) -> None:
    """Raise ValueError for minibatches that are on a device, and PyTorch's RuntimeError without a driver."""
    if not pin_memory:
        return
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"pin_memory=True with device={str(device)!r}: minibatches are in the memory of the GPU already. "
            "Leave pin_memory out, or use device='cpu' and minibatch.to('cuda', non_blocking=True)"
        )
    torch.empty(1, pin_memory=True)


def pinned_bytes(nbytes: int) -> int:
    """Memory that torch's host allocator takes for so many bytes: a power of two."""
    return 1 << max(12, (nbytes - 1).bit_length())
