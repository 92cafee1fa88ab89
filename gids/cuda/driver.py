"""Asks the CUDA driver for its devices, through libcuda. Called by `gids info --system` and open_device.

Needs neither torch nor cupy, creates no context and allocates nothing on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PCI_BUS_ID_BYTES = 32
_HOST_NATIVE_ATOMICS = 86  # CUdevice_attribute numbers, from cuda.h
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class Device:
    """One CUDA device. pci: its address in sysfs, such as 0000:01:00.0."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    host_native_atomics: bool
    pci: str


@dataclass(frozen=True)
class Driver:
    """The driver and its devices.

    version: the newest CUDA that it supports, such as (13, 0). fault: why none can be used, or "".
    """

    version: tuple[int, int] | None
    devices: list[Device]
    fault: str


def ask_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Ask the driver. Never raises. load: opens a shared library."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return Driver(None, [], "no NVIDIA driver (libcuda.so.1 not found)")
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    supported = (version.value // 1000, version.value % 1000 // 10)
    if status := cuda.cuInit(0):
        return Driver(supported, [], f"the driver does not start: {_error(cuda, status)}")
    count = ctypes.c_int()
    if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return Driver(supported, [], f"the driver does not list devices: {_error(cuda, status)}")
    devices = [_device(cuda, index) for index in range(count.value)]
    return Driver(supported, devices, "" if devices else "the driver has no device")


def _device(cuda: Any, index: int) -> Device:
    handle = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(_PCI_BUS_ID_BYTES)
    memory = ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceGetPCIBusId(pci, len(pci), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    return Device(
        name=name.value.decode(errors="replace"),
        memory_bytes=memory.value,
        capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        host_native_atomics=attribute(_HOST_NATIVE_ATOMICS) == 1,
        pci=pci.value.decode(errors="replace").lower(),
    )


def _error(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return text.value.decode(errors="replace") if text.value else f"CUDA error {status}"
