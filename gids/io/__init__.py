"""Reading of files past the page cache, through io_uring where the machine has it; and on a GPU's request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gids.io.engine import Engine, open_engine, probe
from gids.io.page_cache import drop_page_cache

if TYPE_CHECKING:
    from gids.io.device_queue import DeviceQueue, QueueTable, Round

__all__ = ["DeviceQueue", "Engine", "QueueTable", "Round", "drop_page_cache", "open_engine", "probe"]


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    if name not in __all__:
        raise AttributeError(f"module 'gids.io' has no attribute {name!r}")
    from gids.io import device_queue

    return getattr(device_queue, name)
