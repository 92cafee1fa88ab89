"""Checks of the arguments of a cache in device memory. Called by DeviceFeatureCache and its placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gids import _core
from gids.cache.device.state import DEVICE_POLICIES
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.cuda.device import Device

HOST_POLICIES = ("lookahead", "static")


def check_policies(policy: str, host_policy: str) -> None:
    """Raise ValueError for a policy that a device does not have."""
    if policy == "lru":
        raise ValueError(
            f"policy='lru' works on device='cpu' only; on a GPU use one of {', '.join(DEVICE_POLICIES)}"
        )
    if policy not in DEVICE_POLICIES:
        raise ValueError(f"policy must be one of {', '.join(DEVICE_POLICIES)} (got {policy!r})")
    if host_policy not in HOST_POLICIES:
        raise ValueError(f"host_policy must be one of {', '.join(HOST_POLICIES)} (got {host_policy!r})")


def check_lines(lines: Mapping[str, int], host_lines: Mapping[str, int]) -> None:
    """Raise ValueError for a number of lines that a table cannot have."""
    for name, count in lines.items():
        if count < 0 or host_lines[name] < 0 or count + host_lines[name] > _core.MAX_LINES:
            raise ValueError(
                f"table '{name}': lines and host lines must be 0 to {_core.MAX_LINES} together (got {count} "
                f"and {host_lines[name]})"
            )


def check_memory(device: Device, purposes: Mapping[str, int]) -> None:
    """Raise MemoryBudgetError, which lists the sum, if purposes (name -> bytes) exceed free device memory."""
    free, total = device.memory_info()
    needed = sum(purposes.values())
    if needed > free:
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        raise MemoryBudgetError(
            f"the cache needs {listing} = {needed} bytes ({format_bytes(needed)}) on {device.name}, which "
            f"has {format_bytes(free)} of {format_bytes(total)} free: give it less, or free memory there"
        )
