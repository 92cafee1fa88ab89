"""Places host memory on the NUMA node of a GPU, which then reads it without crossing to another socket.

Called by CudaDevice, which asks for its node, and by host_memory and DeviceQueue, which allocate the memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path

_log = logging.getLogger("gids")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED, _MOVE = 1, 2  # MPOL_PREFERRED, MPOL_MF_MOVE
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def numa_node(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node with memory that a PCI device is on. pci_address: "0000:3b:00.0".

    None if all memory is on one node, or if the kernel does not report the device's node.
    """
    try:
        nodes = _numbers((sysfs / "devices/system/node/has_memory").read_text())
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if len(nodes) > 1 and node in nodes else None


def _numbers(text: str) -> set[int]:
    """The numbers of a kernel's list, such as "0-1,4"."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


def prefer_node(address: int, nbytes: int, node: int | None) -> bool:
    """Have the kernel take the pages of a mapping from a node while it has free ones, then from the others.

    address: of the start of a memory page. Pages that exist are moved. node: None does nothing. Returns
    whether the kernel agreed; if not, the memory works all the same, and the reason is logged once.
    """
    number = _MBIND.get(platform.machine())
    if node is None or number is None or nbytes <= 0:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _WORD_BITS
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel reads one bit less
    span = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    policy = ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(_MOVE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *span, *policy):
        _tell(node, os.strerror(ctypes.get_errno()))
        return False
    return True


@functools.cache
def _tell(node: int, why: str) -> None:
    _log.info("host memory is not placed on NUMA node %d of the GPU: %s", node, why)
