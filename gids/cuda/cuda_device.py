"""A CUDA device: torch's memory and streams, and kernels that are launched through the driver.

open_cuda() makes it, with an error for each thing that can be missing. All driver calls run in the device's
primary context, which torch uses too, not in the calling thread's current context.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from gids import _core
from gids.cuda import driver as libcuda
from gids.cuda.compiler import Compiler, installed_sources, open_compiler
from gids.cuda.device import (
    COPY_PRIORITY,
    Argument,
    Device,
    Event,
    HeldStream,
    Mapping,
    Stream,
    as_word,
    check_grid,
    check_host_range,
    in_process,
)
from gids.cuda.driver import CudaError, Driver, Libcuda, ask_driver
from gids.cuda.host_memory import numa_node
from gids.errors import NoDeviceError

_LAUNCH, _RECORD, _WAIT_EVENT, _WAIT_VALUE, _FILL, _COPY = range(6)
"""The operations of native/cuda/commands.h."""

_lock = threading.Lock()
_open: dict[int, CudaDevice] = {}


class CudaEvent:
    """An event of a CudaStream, whose commands may still be held. torch's streams wait for it, too."""

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        self._device, self._stream, self._passed = device, stream, False
        self._flushes = stream.flushes
        self.cuda_event = device.take_event()
        weakref.finalize(self, device.idle_events.append, self.cuda_event).atexit = False

    def _enqueue(self) -> None:
        if self._stream.flushes == self._flushes:
            self._stream.flush()

    def synchronize(self) -> None:
        if not self._passed:
            self._enqueue()
            with self._device.in_context():
                self._device.driver.call("cuEventSynchronize", self.cuda_event)
            self._passed = True

    def query(self) -> bool:
        self._enqueue()
        with self._device.in_context():
            self._passed = self._passed or self._device.driver.ready("cuEventQuery", self.cuda_event)
        return self._passed

    def wait(self, stream: Stream) -> None:
        """torch's Stream.wait_event() calls it."""
        self._enqueue()  # a wait for an event that is not recorded yet waits for nothing
        self._device._put(stream, _WAIT_EVENT, self.cuda_event, kept=[self])


class CudaStream(HeldStream):
    """A stream of new_stream(), with the commands that a batch holds. external: the same stream for torch."""

    def __init__(self, device: CudaDevice, handle: int) -> None:
        made: Any = torch.cuda.ExternalStream  # has no annotations
        self.external: torch.cuda.Stream = made(handle, device=device.torch_device)
        self.cuda_stream, self._device = handle, device
        self._words: array[int] = array("Q")
        self._kept: list[object] = []
        self._flushing = threading.RLock()

    def put(self, words: Sequence[int], kept: Sequence[object]) -> None:
        """Add a command. kept: alive until it is enqueued, also by another thread meanwhile."""
        self._words.extend(words)
        self._kept.extend(kept)
        if not self.batches:
            self.flush()

    def flush(self) -> None:
        with self._flushing:  # if nothing is held, another thread may be enqueueing it
            if self._words:
                kept, self._kept = self._kept, []
                words, self._words = self._words, array("Q")
                self._device.enqueue(self.cuda_stream, words)
                self.flushes += 1
                kept.clear()

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            event.wait(self)
        else:
            of_torch: Any = event
            self.put((_WAIT_EVENT, of_torch.cuda_event), [event])

    def record_event(self) -> CudaEvent:
        with self._flushing:  # no other thread flushes before it is added
            event = CudaEvent(self._device, self)
            self.put((_RECORD, event.cuda_event), [event])
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Memory:
    """Device memory that the driver allocated, for torch.as_tensor(). A forked child does not free it."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        address = device.allocate_bytes(nbytes)
        data = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        self.__cuda_array_interface__ = data
        end = weakref.finalize(self, in_process, os.getpid(), partial(device.undo, "cuMemFree_v2", address))
        end.atexit = False  # the driver releases everything then


class CudaDevice(Device):
    """The device of one index. driver: initialized."""

    def __init__(self, index: int, driver: Libcuda, compiler: Compiler) -> None:
        self.driver, self._compiler = driver, compiler
        self._lock = threading.Lock()  # of _units
        self._units: dict[str, dict[str, int]] = {}  # handles of kernels by name
        self._idle_streams: dict[int, list[int]] = {}  # handles by priority
        self._own_streams: weakref.WeakValueDictionary[int, CudaStream] = weakref.WeakValueDictionary()
        self.idle_events: list[int] = []
        self._enqueueing = driver.addresses(libcuda.ENQUEUEING)
        handle = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(handle), index)
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), handle)
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)  # until the process ends
        self._context = context
        self.torch_device, self.index = torch.device("cuda", index), index
        self.name = name.value.decode(errors="replace")
        self.sm_count = driver.attribute(handle.value, libcuda.MULTIPROCESSOR_COUNT)
        parts = (libcuda.PCI_DOMAIN, libcuda.PCI_BUS, libcuda.PCI_DEVICE)
        pci = (driver.attribute(handle.value, part) for part in parts)
        self.numa_node = numa_node("{:04x}:{:02x}:{:02x}.0".format(*pci))
        capability = (libcuda.CAPABILITY_MAJOR, libcuda.CAPABILITY_MINOR)
        major, minor = (driver.attribute(handle.value, part) for part in capability)
        self._target = compiler.target((major, minor))
        self._can_wait = bool(driver.attribute(handle.value, libcuda.CAN_WAIT_64_BITS))

    def launch(
        self, stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument
    ) -> None:
        check_grid(kernel, blocks, threads)
        words = [as_word(kernel, i, arg, self.torch_device)[0] for i, arg in enumerate(args)]
        handle = self._kernel(unit, kernel)
        if blocks == 0:
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self._put(stream, _LAUNCH, handle, blocks, threads, len(words), *words, kept=tensors)

    def fill(self, stream: Stream, tensor: torch.Tensor, byte: int) -> None:
        if tensor.nbytes:
            self._put(stream, _FILL, tensor.data_ptr(), byte, tensor.nbytes, kept=[tensor])

    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        if to.nbytes:
            addresses = to.data_ptr(), source.data_ptr()
            self._put(stream, _COPY, *addresses, to.nbytes, kept=[to, source])

    def _put(self, stream: Stream, *words: int, kept: Sequence[object] = ()) -> None:
        """Enqueue a command, of native/cuda/commands.h. kept: alive until it is enqueued."""
        if isinstance(stream, CudaStream):
            stream.put(words, kept)
        else:
            self.enqueue(cast("Any", stream).cuda_stream, array("Q", words))

    def enqueue(self, stream: int, words: array[int]) -> None:
        """Enqueue commands on a stream of this handle."""
        assert self._context.value is not None
        status, function = _core.enqueue(self._enqueueing, self._context.value, stream, np.asarray(words))
        self.driver.check(libcuda.ENQUEUEING[function], status)

    def preload(self, *units: str) -> None:
        for unit in units:
            self._load(unit)

    def new_stream(self, priority: int = COPY_PRIORITY) -> Stream:
        # Not torch's: two of its 32 pooled streams can be the same. A stream that waits for a word stops its
        # hardware channel, and so every stream on that channel; other priorities use other channels.
        idle = self._idle_streams.setdefault(priority, [])
        try:
            handle = idle.pop()
        except IndexError:
            handle = self._create("cuStreamCreateWithPriority", libcuda.STREAM_NON_BLOCKING, priority)
        stream = CudaStream(self, handle)
        self._own_streams[handle] = stream
        # Never destroyed, because torch's allocator remembers it; the next owner gets its cached memory too.
        weakref.finalize(stream, idle.append, handle).atexit = False
        return stream

    def current_stream(self) -> Stream:
        stream: Any = torch.cuda.current_stream(self.torch_device)
        current: Stream = self._own_streams.get(stream.cuda_stream, stream)
        return current

    def record_current(self) -> Event:
        stream = self.current_stream()
        if isinstance(stream, CudaStream):
            return stream.record_event()
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        recorded: Event = event
        return recorded

    def take_event(self) -> int:
        """The handle of an event that nobody has."""
        try:
            return self.idle_events.pop()
        except IndexError:
            return self._create("cuEventCreate", libcuda.EVENT_BLOCKING_SYNC | libcuda.EVENT_DISABLE_TIMING)

    def _create(self, function: str, *options: int) -> int:
        """A new handle of the driver's."""
        made = ctypes.c_void_p()
        with self.in_context():
            self.driver.call(function, ctypes.byref(made), *options)
        assert made.value is not None
        return made.value

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        if isinstance(stream, CudaStream) and not stream.batches:
            stream.flush()  # torch's work comes after it
        with torch.cuda.device(self.torch_device), torch.cuda.stream(_of_torch(stream)):
            yield

    def map_host(self, address: int, nbytes: int, *, memory: object) -> Mapping:
        check_host_range(address, nbytes)
        flags = libcuda.REGISTER_PORTABLE | libcuda.REGISTER_DEVICEMAP
        with self.in_context():
            try:
                self.driver.call("cuMemHostRegister_v2", address, nbytes, flags)
            except CudaError as error:
                raise RuntimeError(_why_not_mapped(address, nbytes, error)) from error
            mapped = ctypes.c_uint64()
            try:
                self.driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, 0)
            except CudaError:
                self.driver.call("cuMemHostUnregister", address)
                raise
        return Mapping(mapped.value, memory, partial(self.undo, "cuMemHostUnregister", address))

    def wait_value(self, stream: Stream, address: int, value: int) -> bool:
        if not self._can_wait:
            return False
        self._put(stream, _WAIT_VALUE, address, value & (1 << 64) - 1)
        return True

    def copy_from_host(self, stream: Stream, to: torch.Tensor, address: int) -> None:
        if to.nbytes:
            self._put(stream, _COPY, to.data_ptr(), address, to.nbytes, kept=[to])

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = self.current_stream()
        self.copy(stream, copy, tensor)
        return copy, stream.record_event()

    def hand_over(self, tensor: torch.Tensor, from_stream: Stream, to_stream: Stream) -> None:
        if tensor.device == self.torch_device:
            tensor.record_stream(_of_torch(to_stream))

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return self.empty(0, torch.uint8)
        memory: Any = _Memory(self, nbytes)  # the tensor keeps it
        tensor: torch.Tensor = torch.as_tensor(memory, device=self.torch_device)
        return tensor

    def allocate_bytes(self, nbytes: int) -> int:
        """The address of new memory. If the driver has too little, torch first frees what it only keeps."""
        try:
            return self._allocate(nbytes)
        except CudaError as error:
            if error.status != libcuda.OUT_OF_MEMORY:
                raise
        torch.cuda.empty_cache()
        try:
            return self._allocate(nbytes)
        except CudaError as error:
            raise torch.cuda.OutOfMemoryError(f"{nbytes} bytes on {self.name}: {error}") from error

    def _allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with self.in_context():
            self.driver.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def _captures(self) -> bool:
        with torch.cuda.device(self.torch_device):
            return bool(torch.cuda.is_current_stream_capturing())

    def _driver_memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def _idle_bytes(self) -> int:
        # A segment goes back as a whole, or by the block if it is expandable. CUDA graphs keep those of their
        # pools, which are not (0, 0).
        idle, snapshot = 0, cast("Callable[[], list[dict[str, Any]]]", torch.cuda.memory_snapshot)
        for segment in snapshot():
            if segment["device"] != self.index or tuple(segment["segment_pool_id"]) != (0, 0):
                continue
            free = [int(b["size"]) for b in segment["blocks"] if b["state"] != "active_allocated"]
            if segment.get("is_expandable", False) or len(free) == len(segment["blocks"]):
                idle += sum(free)
        return idle

    def undo(self, function: str, address: int) -> None:
        """Call a driver function that gives memory back."""
        try:
            with self.in_context():
                self.driver.call(function, address)
        except CudaError as error:
            if error.status != libcuda.DEINITIALIZED:  # CUDA has ended, and released everything
                raise

    def _kernel(self, unit: str, kernel: str) -> int:
        kernels = self._units.get(unit) or self._load(unit)
        if kernel not in kernels:
            raise KeyError(f"no kernel {kernel!r} in {unit} (has {', '.join(kernels) or 'none'})")
        return kernels[kernel]

    def _load(self, unit: str) -> dict[str, int]:
        with self._lock:
            if unit in self._units:
                return self._units[unit]
            source = self._compiler.sources.unit(unit)
            code = self._compiler.compile(source, self._target)
            with self.in_context():
                module = ctypes.c_void_p()  # until the process ends
                self.driver.call("cuModuleLoadData", ctypes.byref(module), code)
                kernels = {name: self._find(module, name) for name in source.kernels}
            self._units[unit] = kernels
            return kernels

    def _find(self, module: ctypes.c_void_p, name: str) -> int:
        handle = ctypes.c_void_p()
        self.driver.call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        assert handle.value is not None
        # Without it the first launch loads the kernel, and may wait for the whole device.
        if self.driver.has("cuFuncLoad"):
            self.driver.call("cuFuncLoad", handle)
        return handle.value

    @contextlib.contextmanager
    def in_context(self) -> Iterator[None]:
        current = ctypes.c_void_p()
        self.driver.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == self._context.value:
            yield
            return
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(current))


def _of_torch(stream: Any) -> Any:
    """The stream as torch knows it."""
    return stream.external if isinstance(stream, CudaStream) else stream


def _why_not_mapped(address: int, nbytes: int, error: CudaError) -> str:
    what = f"CUDA cannot pin {nbytes} bytes of host memory at {address:#x}"
    if error.status == libcuda.ALREADY_REGISTERED:
        return f"{what}: part of it is already mapped; close that mapping first ({error})"
    if error.status == libcuda.OUT_OF_MEMORY:
        return f"{what}: free host memory, or raise the memory limit of the container ({error})"
    return f"{what} ({error})"


def open_cuda(device: str | torch.device | None, *, load: Callable[[str], Any] = ctypes.CDLL) -> CudaDevice:
    """gids.cuda.open_device. load: opens a shared library."""
    index = _index(device)
    toolkit = _torch_toolkit()
    driver = ask_driver(load)
    _check_driver(driver, toolkit, "torch was built with")
    if index is None:
        index = torch.cuda.current_device()
    if index >= len(driver.devices):
        have = ", ".join(f"cuda:{i} {d.name}" for i, d in enumerate(driver.devices))
        raise ValueError(
            f"no device cuda:{index}: the driver has {have}; CUDA_VISIBLE_DEVICES may hide others"
        )
    with _lock:
        if index not in _open:
            cupy = "cupy-cuda12x" if toolkit[0] == 12 else "cupy-cuda13x"
            compiler = open_compiler(installed_sources(), cupy)
            _check_driver(driver, compiler.version, "CuPy compiles with")
            cast("Callable[[], None]", torch.cuda.init)()
            library = Libcuda(load)
            library.call("cuInit", 0)
            _open[index] = CudaDevice(index, library, compiler)
        return _open[index]


def _index(device: str | torch.device | None) -> int | None:
    try:
        wanted = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'cuda' or 'cuda:0' (got {device!r})") from error
    if wanted.type != "cuda":
        raise ValueError(f"device must be 'cuda' or 'cuda:0' (got {str(wanted)!r})")
    return wanted.index


def _torch_toolkit() -> tuple[int, int]:
    """The CUDA version that torch was built with. Raises NoDeviceError without CUDA."""
    version = torch.version.cuda
    if version is None:
        raise NoDeviceError(
            f"device='cuda' needs a CUDA build of torch; this is {torch.__version__}: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _check_driver(driver: Driver, toolkit: tuple[int, int], whose: str) -> None:
    """Raise NoDeviceError without a driver or device, or if the driver's major version is too old."""
    if driver.version is not None and driver.version[0] < toolkit[0]:
        raise NoDeviceError(
            f"the NVIDIA driver supports CUDA {driver.version[0]}.{driver.version[1]}; {whose} CUDA "
            f"{toolkit[0]}.{toolkit[1]}: update the driver, or install packages for CUDA {driver.version[0]}"
        )
    if driver.fault:
        raise NoDeviceError(f"no CUDA device: {driver.fault}; run `gids info --system` for details")
