"""A device on the host, for tests: the kernels of native/**/*.cu, compiled by g++ and run as fibers.

See tests/emulator.h. An error in a kernel (a barrier that not all threads reach, an argument of the wrong
size, an endless wait) raises RuntimeError here; on a GPU it would hang, or silently read wrong data.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulator_memory import EmulatedMemory

from gids.cuda.compiler import Sources
from gids.cuda.device import (
    COPY_PRIORITY,
    Argument,
    Device,
    HeldStream,
    Mapping,
    as_word,
    check_grid,
    check_host_range,
)

HERE = Path(__file__).parent
NATIVE = HERE.parent / "native"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-DGIDS_EMULATED"]
FLAGS += [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-missing-field-initializers",
    "-include",
    str(HERE / "emulator.h"),
]
# The handlers are in emulator.cpp; the host's libubsan is not linked.
CHECKS = ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fsanitize-recover=all"]
SOURCES = Sources(NATIVE)


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint32),
        ("kind", ctypes.c_char),
        ("reads", ctypes.c_bool),
        ("pointee", ctypes.c_uint32),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("parameter_count", ctypes.c_uint32),
    ]


class Unit:
    """The kernels of one source, by name, with their parameters."""

    def __init__(self, library: ctypes.CDLL, launch: ctypes._NamedFuncPointer) -> None:
        count = ctypes.c_uint32.in_dll(library, "emulated_kernel_count").value
        table = (_Kernel * count).in_dll(library, "emulated_kernels")
        self._library, self._launch = library, launch
        self._kernels = {kernel.name.decode(): kernel for kernel in table}

    def writes(self, kernel: str, args: Sequence[Argument]) -> list[torch.Tensor]:
        """The tensors that a kernel may write to: those that are no pointers to const."""
        parameters = self._kernels[kernel].parameters
        return [
            arg
            for position, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and not parameters[position].reads
        ]

    def prepare(
        self, kernel: str, blocks: int, threads: int, waiting: int, values: list[tuple[Argument, int, int]]
    ) -> Callable[[int, float], None]:
        """Check the arguments. Returns run(seed, limit_s), which holds their bits only.

        waiting: number of blocks that a kernel may have whose threads sleep.
        """
        if kernel not in self._kernels:
            raise KeyError(f"no kernel {kernel!r} in {self._library._name} (has {sorted(self._kernels)})")
        entry = self._kernels[kernel]
        if len(values) != entry.parameter_count:
            raise RuntimeError(f"{kernel} takes {entry.parameter_count} arguments; {len(values)} were given")
        for position, (value, _, nbytes) in enumerate(values):
            if fault := _mismatch(entry.parameters[position], value, nbytes):
                raise RuntimeError(f"{kernel}: parameter {position} {fault}")
        words = [ctypes.c_uint64(bits) for _, bits, _ in values]

        def run(seed: int, limit_s: float) -> None:
            arguments = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
            error, entry_at = ctypes.create_string_buffer(4000), ctypes.byref(entry)
            grid = (blocks, threads, waiting)
            if self._launch(entry_at, *grid, arguments, seed, limit_s, error, len(error)):
                raise RuntimeError(f"{error.value.decode()}\n(seed {seed})")

        return run


def _mismatch(parameter: _Parameter, value: Argument, nbytes: int) -> str:
    """The fault of an argument, or ""."""
    kind = parameter.kind.decode()
    if parameter.bytes != nbytes:
        return f"has {parameter.bytes} bytes; {nbytes} were given ({type(value).__name__})"
    if isinstance(value, torch.Tensor) and kind != "p":
        return f"is no pointer (kind {kind!r}); a tensor was given"
    if isinstance(value, np.floating) != (kind == "f"):
        return f"is of kind {kind!r}; {type(value).__name__} was given"
    sizes = {2, 4, 8}
    if isinstance(value, torch.Tensor) and len({parameter.pointee, value.element_size()} & sizes) == 2:
        return f"points to {parameter.pointee} bytes each; the tensor is {value.dtype}"
    return ""


class Builder:
    """Compiles units into a folder, again only if a source changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._units: dict[str, Unit] = {}
        source = HERE / "emulator.cpp"
        self._runtime = self._compile("emulator", source.read_text(), [str(source)], [])
        self.library = ctypes.CDLL(str(self._runtime))
        self.library.emulated_launch.argtypes = [
            *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
            *(ctypes.c_ulonglong, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t),
        ]
        self.library.emulated_allocate.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self.library.emulated_allocate.restype = ctypes.c_void_p
        self.library.emulated_free.argtypes = [ctypes.c_void_p]
        self.library.emulated_free.restype = None

    def unit(self, name: str) -> Unit:
        """A source below native/, or at an absolute path."""
        if name not in self._units:
            unit = SOURCES.unit(name)
            table = "".join(f'emulated::describe<{k}>("{k}", {k}),\n' for k in unit.kernels)
            wrapper = self._folder / f"{unit.path.stem}-{_digest(unit.text, str(unit.path))}.cpp"
            wrapper.write_text(
                f'#include "{unit.path}"\n'
                f'extern "C" const emulated::Kernel emulated_kernels[] = {{\n{table}}};\n'
                f'extern "C" const unsigned emulated_kernel_count = {len(unit.kernels)};\n'
            )
            options = [*CHECKS, f"-I{SOURCES.include}", f"-I{NATIVE}", str(wrapper)]
            built = self._compile(unit.path.stem, unit.text, options, [str(self._runtime)])
            self._units[name] = Unit(ctypes.CDLL(str(built)), self.library.emulated_launch)
        return self._units[name]

    def _compile(self, stem: str, text: str, options: list[str], libraries: list[str]) -> Path:
        made_of = [text, *FLAGS, *options, *libraries]
        made_of += [path.read_text() for path in [*sorted(HERE.glob("emulator*.h")), *SOURCES.headers()]]
        target = self._folder / f"{stem}-{_digest(*made_of)}.so"
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process of tests may be compiling it
            if not target.exists():
                compiled, built = target.with_suffix(".o"), target.with_suffix(".part")
                _run([COMPILER, *FLAGS, *options, "-c", "-o", str(compiled)])
                _run([COMPILER, "-shared", "-pthread", str(compiled), *libraries, "-o", str(built)])
                compiled.unlink()
                built.replace(target)
        return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


folder: Path | None = None
"""The folder of compiled units (default: a temporary folder of this process)."""


@functools.cache
def _builder() -> Builder:
    if shutil.which(COMPILER) is None:
        raise RuntimeError(f"no C++ compiler ({COMPILER})")
    at = folder
    if at is None:
        at = Path(tempfile.mkdtemp(prefix="gids-emulator-"))
        atexit.register(shutil.rmtree, at, ignore_errors=True)
    return Builder(at)


class EmulatedEvent:
    """passed: whether the work before it is done. stream: that may hold it until its next flush."""

    passed = True
    stream: EmulatedStream | None = None
    flushes = 0

    def held_by(self, stream: EmulatedStream) -> None:
        """It is recorded there next."""
        self.passed, self.stream, self.flushes = False, stream, stream.flushes

    def enqueue(self) -> None:
        """See to it that it is enqueued."""
        if self.stream is not None and self.stream.flushes == self.flushes:
            self.stream.flush()

    def synchronize(self) -> None:
        self.enqueue()
        if self.stream is not None:
            self.stream.waits += 1

    def query(self) -> bool:
        self.enqueue()
        return True


def _now() -> bool:
    return True


class EmulatedStream(HeldStream):
    """A stream that does all work when it is enqueued. Batches hold it.

    entries, waits: settable; how often the host entered the driver to enqueue something on it, and to wait
    for it.
    """

    entries = 0
    waits = 0

    def __init__(self) -> None:
        self.held: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        self._flushing = threading.RLock()

    def put(
        self, work: Callable[[], object], may_run: Callable[[], bool] = _now, *, counts: bool = True
    ) -> None:
        """counts: whether the host enters the driver for it. Else it may wait for what is held."""
        self.held.append((work, may_run))
        if not self.batches and (counts or len(self.held) == 1):
            self.flush(counts=counts)

    def flush(self, *, counts: bool = True) -> None:
        """Enqueue what is held, in order, from whatever threads."""
        with self._flushing:
            if not self.held:
                return
            self.entries += counts
            while self.held:
                self.enqueue(*self.held.popleft())
            self.flushes += 1

    def enqueue(self, work: Callable[[], object], may_run: Callable[[], bool]) -> None:
        work()

    def wait_stream(self, stream: EmulatedStream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: EmulatedEvent) -> None:
        event.enqueue()
        self.put(lambda: None, lambda: event.passed)

    def record_event(self, *, counts: bool = True) -> EmulatedEvent:
        event = EmulatedEvent()
        with self._flushing:
            event.held_by(self)
            self.put(partial(setattr, event, "passed", True), counts=counts)
        return event

    def synchronize(self) -> None:
        self.waits += 1
        self.flush()


class EmulatedDevice(Device):
    """torch's CPU as a device. seed: of the order in which threads and blocks run; each launch has another.

    Tensors of empty() and zeros() end where a page of memory ends: a kernel that goes beyond fails. Their
    memory is poisoned when they are released: see emulator_memory.py.

    capturing: settable; whether torch's current stream is captured. limit_s: for one launch or wait_value.
    mapped: the host memory that is mapped now, bytes by address. launches: names of the kernels launched.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        limit_s: float = 60.0,
        total_bytes: int = 8 << 30,
        index: int = 0,
    ) -> None:
        self.torch_device, self.index = torch.device("cpu"), index
        self.name = "emulated"
        self.sm_count = 2
        self.limit_s = limit_s
        self.memory = EmulatedMemory(_allocate, _free, total_bytes)
        self.mapped: dict[int, int] = {}
        self.launches: list[str] = []
        self._seed = seed
        self._default = self._of_torch()
        self._here = threading.local()
        self.capturing = False

    def _of_torch(self) -> EmulatedStream:
        """torch's default stream."""
        stream = EmulatedStream()
        stream.of_torch = True
        return stream

    @property
    def _stream(self) -> EmulatedStream:
        """The current stream of this thread."""
        found: EmulatedStream = getattr(self._here, "stream", self._default)
        return found

    @_stream.setter
    def _stream(self, stream: EmulatedStream) -> None:
        self._here.stream = stream

    def launch(
        self, stream: EmulatedStream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument
    ) -> None:
        check_grid(kernel, blocks, threads)
        values = [(arg, *as_word(kernel, i, arg, self.torch_device)) for i, arg in enumerate(args)]
        built = _builder().unit(unit)
        run = built.prepare(kernel, blocks, threads, self.sm_count, values)
        self.check_order(kernel, stream, [arg for arg in args if isinstance(arg, torch.Tensor)])
        self.memory.collect()
        self.launches.append(kernel)
        self._seed += 1
        # Memory that torch allocated by itself is not poisoned when it is released: it is kept for the work.
        kept = [arg for arg in args if isinstance(arg, torch.Tensor) and not self.memory.owns(arg)]
        stream.put(partial(_keeping, kept, run, self._seed, self.limit_s))
        self.note_written(stream, built.writes(kernel, args))

    def fill(self, stream: EmulatedStream, tensor: torch.Tensor, byte: int) -> None:
        self.check_order("fill", stream, [tensor])
        kept = None if self.memory.owns(tensor) else tensor
        stream.put(partial(_keeping, kept, ctypes.memset, tensor.data_ptr(), byte, tensor.nbytes))
        self.note_written(stream, [tensor])

    def copy(self, stream: EmulatedStream, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.nbytes == source.nbytes
        self.check_order("copy", stream, [to, source])
        kept = [tensor for tensor in (to, source) if not self.memory.owns(tensor)]
        stream.put(partial(_keeping, kept, ctypes.memmove, to.data_ptr(), source.data_ptr(), to.nbytes))
        self.note_written(stream, [to])

    def check_order(self, what: str, stream: EmulatedStream, tensors: Sequence[torch.Tensor]) -> None:
        """Called before work of a stream uses these tensors. Here all work before it is done."""

    def note_written(self, stream: EmulatedStream, tensors: Sequence[torch.Tensor]) -> None:
        """Called after work was enqueued that writes to these tensors."""

    def preload(self, *units: str) -> None:
        for unit in units:
            _builder().unit(unit)

    def new_stream(self, priority: int = COPY_PRIORITY) -> EmulatedStream:
        return EmulatedStream()

    def current_stream(self) -> EmulatedStream:
        return self._stream

    @contextlib.contextmanager
    def use(self, stream: EmulatedStream) -> Iterator[None]:
        if not stream.batches:
            stream.flush()  # torch's work comes after it
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def map_host(self, address: int, nbytes: int, *, memory: object) -> Mapping:
        check_host_range(address, nbytes)
        for start, size in self.mapped.items():
            if start < address + nbytes and address < start + size:
                raise RuntimeError(f"host memory at {address:#x} is already mapped")
        self.mapped[address] = nbytes
        return Mapping(address, memory, partial(self.mapped.pop, address, None))

    def wait_value(self, stream: EmulatedStream, address: int, value: int) -> bool:
        self.check_mapped("wait_value", address)
        stream.put(partial(_await_word, address, value, self.limit_s))
        return True

    def check_mapped(self, what: str, address: int, nbytes: int = 8) -> None:
        """Raise RuntimeError unless these bytes are in mapped host memory."""
        end = address + nbytes
        if not any(start <= address and end <= start + size for start, size in self.mapped.items()):
            raise RuntimeError(f"{what} at {address:#x}, which is not in mapped host memory")

    def copy_from_host(self, stream: EmulatedStream, to: torch.Tensor, address: int) -> None:
        self.check_mapped(f"copy of {to.nbytes} bytes", address, to.nbytes)
        self.launches.append("copy_from_host")
        self.check_order("copy_from_host", stream, [to])
        stream.put(partial(ctypes.memmove, to.data_ptr(), address, to.nbytes))
        self.note_written(stream, [to])

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, EmulatedEvent]:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copy(self._stream, copy, tensor)
        return copy, self._stream.record_event()

    def hand_over(self, tensor: torch.Tensor, from_stream: EmulatedStream, to_stream: EmulatedStream) -> None:
        self.memory.hand_over(tensor, to_stream)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._tensor(shape, dtype, zeroed=False)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert not self._stream.batches, "torch works on a stream inside a batch, before what the batch holds"
        return self._tensor(shape, dtype, zeroed=True)

    def _tensor(self, shape: int | Sequence[int], dtype: torch.dtype, *, zeroed: bool) -> torch.Tensor:
        sizes = torch.Size([shape] if isinstance(shape, int) else shape)
        if sizes.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        buffer = self.memory.take(sizes.numel() * dtype.itemsize, self._stream, zeroed=zeroed)
        tensor = torch.frombuffer(buffer, dtype=dtype).view(sizes)
        self.note_written(self._stream, [tensor])
        return tensor

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        buffer = self.memory.take(nbytes, self._stream, zeroed=False, kept=False)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        self.note_written(self._stream, [tensor])
        return tensor

    def _captures(self) -> bool:
        return self.capturing

    def _driver_memory(self) -> tuple[int, int]:
        self.memory.collect()
        return self.memory.unreserved_bytes, self.memory.total_bytes

    def _idle_bytes(self) -> int:
        return self.memory.kept_bytes + self.memory.waiting_bytes


def _keeping(kept: object, work: Callable[..., object], *args: Any) -> None:
    """kept: alive until the work is done."""
    work(*args)


def _await_word(address: int, value: int, limit_s: float) -> None:
    word, end = ctypes.c_int64.from_address(address), time.monotonic() + limit_s
    while ctypes.c_int64(word.value - value).value < 0:
        if time.monotonic() > end:
            raise RuntimeError(f"the word at {address:#x} is {word.value} after {limit_s} s, not {value}")
        time.sleep(2e-5)


def _allocate(nbytes: int, zeroed: int) -> int | None:
    address: int | None = _builder().library.emulated_allocate(nbytes, zeroed)
    return address


def _free(address: int) -> None:
    _builder().library.emulated_free(address)
