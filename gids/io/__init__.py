"""Reading of files past the page cache, through io_uring where the machine has it; and on a GPU's request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gids.io.engine import QUEUE_DEPTH, Engine, open_engine, probe
from gids.io.page_cache import drop_page_cache

if TYPE_CHECKING:
    from gids.io.device_queue import DeviceQueue, Round
    from gids.io.queue_table import QueueTable, requests_of

__all__ = [
    "QUEUE_DEPTH",
    "DeviceQueue",
    "Engine",
    "QueueTable",
    "Round",
    "drop_page_cache",
    "open_engine",
    "probe",
    "requests_of",
]


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    if name not in __all__:
        raise AttributeError(f"module 'gids.io' has no attribute {name!r}")
    from gids.io import device_queue, queue_table

    return getattr(device_queue if hasattr(device_queue, name) else queue_table, name)
