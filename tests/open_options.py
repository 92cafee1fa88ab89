"""Options of gids.open(), gids.Tuning and a loader in one dictionary."""

from __future__ import annotations

from typing import Any

import gids
from gids.loader.options import OPTIONS, TUNING


def tuned(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of gids.open() for these options, those of gids.Tuning among them."""
    options = {**options, **more}
    tuning = {name: options.pop(name) for name in TUNING if name in options}
    return options | ({"tuning": gids.Tuning(**tuning)} if tuning else {})


def take_options(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of gids.open() from `given`, and return them. memory is the device's on CUDA."""
    taken = {name: given.pop(name) for name in (*OPTIONS, *TUNING) if name in given}
    if "cuda" in str(given.get("device")) and "memory" in taken and "device_memory" not in taken:
        taken["device_memory"] = taken.pop("memory")
    return tuned(taken)
