"""Reads for a GPU: the request queue, and extents into device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gids.io.device.device_queue import DeviceQueue, QueueTable, Round

__all__ = ["DeviceQueue", "QueueTable", "Round"]


def __getattr__(name: str) -> Any:  # imports torch on first use
    if name not in __all__:
        raise AttributeError(f"module 'gids.io.device' has no attribute {name!r}")
    from gids.io.device import device_queue

    return getattr(device_queue, name)
