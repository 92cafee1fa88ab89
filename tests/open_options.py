"""Options of gids.open() that tests give in one dictionary with a loader's arguments."""

from __future__ import annotations

from typing import Any

from gids.loader.option_names import OPTIONS


def take_options(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of gids.open() from `given`, and return them. memory is the device's on CUDA."""
    taken = {name: given.pop(name) for name in OPTIONS if name in given}
    if "cuda" in str(given.get("device")) and "memory" in taken and "device_memory" not in taken:
        taken["device_memory"] = taken.pop("memory")
    return taken
