"""The CUDA driver, through ctypes: the functions that the device calls, and the list of devices.

Needs neither torch nor cupy. Signatures and numbers are from cuda.h; tests/cuda checks them with a libcuda
compiled against it. `gids info --system` and open_device ask for the devices, which creates no context and
allocates nothing on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

# CUdevice_attribute
MULTIPROCESSOR_COUNT = 16
PCI_BUS, PCI_DEVICE, PCI_DOMAIN = 33, 34, 50
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
CAN_WAIT_64_BITS = 122  # CAN_USE_64_BIT_STREAM_MEM_OPS, of the _v2 functions
# Flags of cuStreamCreateWithPriority, cuEventCreate and cuMemHostRegister
STREAM_NON_BLOCKING = 0x1
EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING = 0x1, 0x2
REGISTER_PORTABLE, REGISTER_DEVICEMAP = 0x1, 0x2
# CUresult
OUT_OF_MEMORY, NOT_INITIALIZED, DEINITIALIZED, NOT_READY, ALREADY_REGISTERED = 2, 3, 4, 600, 712

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [POINTER(c_char), c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 6, c_uint, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "cuStreamCreateWithPriority": [POINTER(c_void_p), c_uint, c_int],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_uint64), c_void_p, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuStreamWaitValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
}
_NEWER: dict[str, list[Any]] = {
    "cuFuncLoad": [c_void_p],  # 12.4
}
ENQUEUEING = (
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemsetD8Async",
    "cuMemcpyAsync",
    "cuStreamWaitValue64_v2",
)
"""The functions that native code calls, in the order of native/cuda/commands.h."""


class CudaError(RuntimeError):
    """A driver function failed. status: its CUresult."""

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function}: {text} (CUDA error {status})")
        self.status = status


class Libcuda:
    """libcuda. load: opens a shared library. Raises OSError without a driver."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        library = load("libcuda.so.1")
        self._functions: dict[str, Any] = {}
        for name, types in (_SIGNATURES | _NEWER).items():
            function = getattr(library, name, None)
            if function is None and name in _SIGNATURES:
                raise OSError(f"libcuda.so.1 has no {name}: update the NVIDIA driver")
            if function is not None:
                function.argtypes, function.restype = types, c_int
                self._functions[name] = function

    def has(self, function: str) -> bool:
        """Whether this driver has a newer function."""
        return function in self._functions

    def call(self, function: str, *args: object) -> None:
        """Call a function. Raises CudaError if it fails."""
        self.check(function, self._functions[function](*args))

    def addresses(self, functions: Sequence[str]) -> list[int]:
        """Where functions are, for native code."""
        return [ctypes.cast(self._functions[name], c_void_p).value or 0 for name in functions]

    def check(self, function: str, status: int) -> None:
        """Raise CudaError unless the status that a function returned is 0."""
        if status:
            text = c_char_p()
            self._functions["cuGetErrorString"](status, ctypes.byref(text))
            raise CudaError(function, status, (text.value or b"unknown error").decode(errors="replace"))

    def ready(self, function: str, *args: object) -> bool:
        """False if the function says that something is not ready yet. Raises CudaError if it fails."""
        status: int = self._functions[function](*args)
        if status != NOT_READY:
            self.check(function, status)
        return status != NOT_READY

    def attribute(self, device: int, number: int) -> int:
        """A device's attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value


@dataclass(frozen=True)
class Device:
    """One CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


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
    version = c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    supported = (version.value // 1000, version.value % 1000 // 10)
    if status := cuda.cuInit(0):
        fault = f"the driver does not start: {_error(cuda, status)}"
        if status == NOT_INITIALIZED:
            fault += " (CUDA was used before this process was forked: start it by spawn)"
        return Driver(supported, [], fault)
    count = c_int()
    if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
        return Driver(supported, [], f"the driver does not list devices: {_error(cuda, status)}")
    devices = [_device(cuda, index) for index in range(count.value)]
    return Driver(supported, devices, "" if devices else "the driver has no device")


def _device(cuda: Any, index: int) -> Device:
    handle = c_int()
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    name, memory = ctypes.create_string_buffer(256), c_size_t()
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        value = c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    return Device(
        name=name.value.decode(errors="replace"),
        memory_bytes=memory.value,
        capability=(attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR)),
    )


def _error(cuda: Any, status: int) -> str:
    text = c_char_p()
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return text.value.decode(errors="replace") if text.value else f"CUDA error {status}"
