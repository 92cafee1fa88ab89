"""CUDA devices: memory, streams, kernels compiled at run time, waits. See docs/internals/cuda.md.

Callers write `from gids import cuda; cuda.open_device(...)`, so that tests can replace the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gids.cuda.device import Argument, Device, Event, MadeOn, Mapping, Stream, on_host

__all__ = ["Argument", "Device", "Event", "MadeOn", "Mapping", "Stream", "on_host", "open_device"]


def open_device(device: str | torch.device | None = "cuda") -> Device:
    """Open a CUDA device: "cuda" or None is torch's current device, "cuda:1" the second. Cached.

    Raises ValueError for a device that is not CUDA's or an unknown index; ImportError without CuPy;
    NoDeviceError, a RuntimeError, without a CUDA build of torch, without a driver or device, or if the driver
    is older than the CUDA toolkit of CuPy or torch.
    """
    from gids.cuda.cuda_device import open_cuda

    return open_cuda(device)


def __getattr__(name: str) -> Any:  # imports torch on first use
    if name not in __all__:
        raise AttributeError(f"module 'gids.cuda' has no attribute {name!r}")
    from gids.cuda import device

    return getattr(device, name)
