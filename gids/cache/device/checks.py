"""What a cache in device memory refuses, and why. Called by DeviceFeatureCache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from gids import _core
from gids.cache.device.state import DEVICE_POLICIES
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.cuda.device import Device

HOST_POLICIES = ("lookahead", "static")


def check_policies(policy: str, host_policy: str) -> None:
    """ValueError for a policy that a device does not have."""
    if policy == "lru":
        raise ValueError(
            f"policy='lru' works on device='cpu' only; on a GPU there are {', '.join(DEVICE_POLICIES)}"
        )
    if policy not in DEVICE_POLICIES:
        raise ValueError(f"no policy '{policy}' (there are {', '.join(DEVICE_POLICIES)})")
    if host_policy not in HOST_POLICIES:
        raise ValueError(f"no policy '{host_policy}' for host lines (there are {', '.join(HOST_POLICIES)})")


def check_lines(lines: Mapping[str, int], host_lines: Mapping[str, int]) -> None:
    """ValueError for a number of lines that a table cannot have."""
    for name, count in lines.items():
        if count < 0 or host_lines[name] < 0 or count + host_lines[name] > _core.MAX_LINES:
            raise ValueError(
                f"table '{name}': {count} lines and {host_lines[name]} host lines; a table has 0 to "
                f"{_core.MAX_LINES}"
            )


def check_memory(device: Device, purposes: Mapping[str, int]) -> None:
    """MemoryBudgetError, with the sum, when purposes (name -> bytes) do not fit in free device memory."""
    free, total = device.memory_info()
    needed = sum(purposes.values())
    if needed > free:
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        raise MemoryBudgetError(
            f"the cache takes {listing} = {needed} bytes ({format_bytes(needed)}) of {device.name}'s memory, "
            f"of which {format_bytes(free)} of {format_bytes(total)} are free: give it fewer bytes, or end "
            f"what else takes memory there"
        )


def check_ids(ids: torch.Tensor, table: str, device: torch.device) -> None:
    """TypeError or ValueError for ids that are not int64[n] on the device or the CPU."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"ids for table '{table}' are {type(ids).__name__}; expected a torch.Tensor of int64")
    if ids.dtype != torch.int64:
        raise TypeError(
            f"ids for table '{table}' are {ids.dtype}; expected torch.int64: convert them with .long()"
        )
    if ids.device != device and ids.device.type != "cpu":
        raise ValueError(
            f"ids for table '{table}' are on {ids.device}; expected {device} or cpu: move them with .to()"
        )
    if ids.dim() != 1:
        raise ValueError(f"ids for table '{table}' have shape {tuple(ids.shape)}; expected one dimension")
