"""The interface of a device: memory, streams, launches, waits. Used by io, cache and sampler.

gids.cuda.cuda_device implements it for CUDA; the tests have an emulator that runs the same kernels on the
host. Nothing outside gids.cuda imports cupy or asks torch whether there is a GPU.
"""

from __future__ import annotations

import collections.abc
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Protocol, Self, overload

import numpy as np
import torch

from gids.closing import Closing

Argument = torch.Tensor | int | np.uint32 | np.int32 | np.uint64 | np.float32 | np.float64
"""A kernel argument: a tensor (its address), an int (64 bits) or a NumPy scalar (its own size)."""


_ALL_BITS = (1 << 64) - 1


CACHE_PRIORITY, SAMPLING_PRIORITY, COPY_PRIORITY = -3, -2, -1
"""Priorities of streams, for new_stream(). Training has 0. A lower number is served first."""


class Event(Protocol):
    """A point in a stream's work, like torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block until the work before the event is done."""

    def query(self) -> bool:
        """Whether the work before the event is done."""


class Consumed(deque[Event]):
    """Events of training's stream: before each, it has used the rows of one more minibatch.

    The host runs ahead of the device; unless it waits, more and more minibatches keep their memory.
    """

    def wait(self) -> None:
        """Block until the rows of the minibatch before the last were used."""
        while len(self) > 1:
            self.popleft().synchronize()


class Stream(Protocol):
    """Work in order, like torch.cuda.Stream."""

    def wait_stream(self, stream: Self, /) -> None:
        """Later work waits for the other stream's work so far."""

    def wait_event(self, event: Event, /) -> None:
        """Later work waits for the event."""

    def record_event(self) -> Event:
        """An event after the work so far."""

    def synchronize(self) -> None:
        """Block until the work so far is done."""


class HeldStream(ABC):
    """A stream of new_stream(), whose work batches hold; or torch's own, which they do not.

    batches: number of those that are open. flushes: how often what was held was enqueued.
    """

    of_torch = False
    batches = 0
    flushes = 0

    @abstractmethod
    def flush(self) -> None:
        """Enqueue what is held, in the order in which it was added."""


class MadeOn(dict[str, torch.Tensor]):
    """Tensors by name that a stream of a device makes. They are complete after the event `made`.

    Made when all work that writes to them is enqueued. on_host() brings them to the host.
    """

    def __init__(
        self, tensors: collections.abc.Mapping[str, torch.Tensor], device: Device, stream: Stream
    ) -> None:
        super().__init__(tensors)
        self.device, self.stream, self.made = device, stream, stream.record_event()


@overload
def on_host(values: torch.Tensor) -> torch.Tensor: ...


@overload
def on_host(values: collections.abc.Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...


def on_host(
    values: torch.Tensor | collections.abc.Mapping[str, torch.Tensor],
) -> torch.Tensor | dict[str, torch.Tensor]:
    """A tensor on the CPU, or several by name; the same tensors if they are there already. Blocks.

    Waits for the event of a MadeOn, and for nothing else on the device. Other tensors must be ready for
    torch's current stream, as a user's are: waits for that stream. Names that have the same tensor have the
    same copy. Values without memory (no tensor, or one on "meta") stay as they are, for later checks.

    No other code of gids calls torch's cpu(), which does not wait for the stream that makes a tensor.
    """
    if isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, MadeOn):
        values.made.synchronize()
        with values.device.use(values.device.copy_stream):
            return _copied(values)
    return _copied(values)


def _copied(values: collections.abc.Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies: dict[int, torch.Tensor] = {}
    for value in values.values():
        if id(value) not in copies:
            has_memory = isinstance(value, torch.Tensor) and not value.is_meta
            copies[id(value)] = value.cpu() if has_memory else value
    return {name: copies[id(value)] for name, value in values.items()}


class Mapping(Closing):
    """Host memory that the device reads and writes in place, until close() or until this is dropped.

    It keeps the memory until then, so that no freed memory is mapped, whatever fails meanwhile.

    device_address: address of the memory's first byte on the device. memory: what owns the bytes. unmap: is
    called once. In a forked child it is not called, as the child has neither the device nor the memory.
    """

    def __init__(self, device_address: int, memory: object, unmap: Callable[[], object]) -> None:
        self.device_address = device_address
        self._end = weakref.finalize(self, in_process, os.getpid(), unmap, memory)
        self._end.atexit = False  # the driver releases everything then

    def close(self) -> None:
        """Unmap. Idempotent. The caller has waited for the device's last access."""
        self._end()


class Device(ABC):
    """One device. torch_device: of its tensors. index: its number, "cuda:INDEX". name: by the vendor, also of
    other devices of the kind. sm_count: number of multiprocessors.

    numa_node: the node whose memory is near the device; None if it is not known.
    """

    torch_device: torch.device
    index: int
    name: str
    sm_count: int
    numa_node: int | None = None

    @abstractmethod
    def launch(
        self, stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument
    ) -> None:
        """Enqueue a kernel of a unit (a source below native/, "cache/device_cache.cu"). Does not block.

        blocks: 0 enqueues nothing. threads: a multiple of 32, up to 1024. args: a tensor (contiguous, on this
        device) passes its address, an int 8 bytes, a NumPy scalar its own bytes. The caller keeps tensors
        alive until the kernel has run, or frees them in this stream's order. Raises ValueError for a wrong
        argument, KeyError for a kernel that the unit does not have.
        """

    @contextmanager
    def batch(self, stream: Stream, *, hold: bool = False) -> Iterator[None]:
        """A context: what is enqueued on a stream of new_stream() is enqueued at its end, by one native call.

        That call does not hold the GIL. hold: wait for the next work outside of a batch, the end of a batch
        without hold, use(), or a wait for one of its events. A batch in a batch is part of it. While work is
        held, torch may allocate on this stream, but not work on it. On torch's own streams a batch does
        nothing.
        """
        if not isinstance(stream, HeldStream) or stream.of_torch:
            yield
            return
        stream.batches += 1
        try:
            yield
        finally:
            stream.batches -= 1
            if not (hold or stream.batches):
                stream.flush()

    @abstractmethod
    def fill(self, stream: Stream, tensor: torch.Tensor, byte: int) -> None:
        """Enqueue that every byte of a contiguous tensor on the device becomes `byte`. Does not block."""

    @abstractmethod
    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of the same size on the device. Does not block."""

    @abstractmethod
    def preload(self, *units: str) -> None:
        """Compile and load units now instead of at their first launch. Blocks."""

    @abstractmethod
    def new_stream(self, priority: int = COPY_PRIORITY) -> Stream:
        """A stream that nobody else has, and that does not wait for the default stream.

        Streams of other priorities do not wait for it while it waits for a word. A device that has fewer
        priorities takes the nearest one.
        """

    @cached_property
    def copy_stream(self) -> Stream:
        """A stream for copies to the host that the host waits for at once. It waits for no other stream."""
        return self.new_stream()

    @abstractmethod
    def current_stream(self) -> Stream:
        """torch's current stream on this device."""

    def record_current(self) -> Event:
        """An event of torch's current stream. The host sleeps while it waits for it, and does not spin."""
        return self.current_stream().record_event()

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which torch works and allocates on this device and stream."""

    @abstractmethod
    def map_host(self, address: int, nbytes: int, *, memory: object) -> Mapping:
        """Pin host memory and map it into device memory. Blocks.

        address: of the start of a memory page. memory: the object whose end frees these bytes; the mapping
        keeps it. Raises RuntimeError, with the size, if the driver refuses.
        """

    @abstractmethod
    def wait_value(self, stream: Stream, address: int, value: int) -> bool:
        """Let the stream's later work wait until a word of mapped host memory reaches value.

        address: of the 8-byte word, on the device. "Reaches" is cyclic greater-or-equal. No multiprocessor
        spins. Returns False, and enqueues nothing, if the device cannot wait: launch a kernel that polls.
        """

    @abstractmethod
    def copy_from_host(self, stream: Stream, to: torch.Tensor, address: int) -> None:
        """Enqueue a copy of mapped host memory by a copy engine. Does not block, occupies no multiprocessor.

        to: contiguous, on the device; all of it is written. address: of the first byte, on the host.
        """

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Enqueue a copy to pinned host memory on torch's current stream. Does not block.

        tensor: contiguous, on the device. Returns the copy, and the event after which it is complete. The
        caller keeps both until then.
        """

    @abstractmethod
    def hand_over(self, tensor: torch.Tensor, from_stream: Stream, to_stream: Stream) -> None:
        """Allow a tensor that was allocated on one stream to be used on another.

        After its release, its memory is not reused before the other stream's work so far is done. Does not
        order the streams. Tensors elsewhere need nothing.
        """

    def memory_info(self) -> tuple[int, int]:
        """Bytes of device memory: (free, total). Memory that torch keeps and does not use is free."""
        free, total = self._driver_memory()
        return free + self._idle_bytes(), total

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Uninitialized memory outside torch's allocator, uint8[nbytes], for what is large and lives long.

        With its last tensor it goes back to the driver, and torch keeps what it has cached for others. That
        may wait for the device. Raises torch's OutOfMemoryError.
        """

    def check_not_capturing(self) -> None:
        """Raise RuntimeError if torch's current stream is captured: no graph may contain a loader's work."""
        if self._captures():
            raise RuntimeError(
                "a minibatch was asked for inside torch.cuda.graph(): take it before the capture, and copy "
                "it to the graph's own tensors before each replay"
            )

    @abstractmethod
    def _captures(self) -> bool:
        """Whether torch's current stream is captured."""

    @abstractmethod
    def _driver_memory(self) -> tuple[int, int]:
        """Bytes of device memory: (free, total), as the driver reports them."""

    @abstractmethod
    def _idle_bytes(self) -> int:
        """Bytes that torch can return to the driver, and those whose last kernels still run."""

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor on the device, allocated on torch's current stream."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros on the device, on torch's current stream."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)


def in_process(pid: int, undo: Callable[[], object], kept: object = None) -> None:
    """Call undo() in the process that made something, not in its forked children. kept: lives until then."""
    if os.getpid() == pid:
        undo()


def check_grid(kernel: str, blocks: int, threads: int) -> None:
    """Raise ValueError for a grid that cannot be launched."""
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"{kernel}: threads must be a multiple of 32, up to 1024 (got {threads})")
    if not 0 <= blocks < 1 << 31:
        raise ValueError(f"{kernel}: blocks must be 0 to 2**31 - 1 (got {blocks})")


def check_host_range(address: int, nbytes: int) -> None:
    """Raise ValueError for host memory that is empty or does not start at a memory page."""
    if address % mmap.PAGESIZE or nbytes <= 0:
        raise ValueError(
            f"cannot map {nbytes} bytes of host memory at {address:#x}: it must not be empty, and must start "
            f"at a memory page ({mmap.PAGESIZE} bytes)"
        )


def as_word(kernel: str, position: int, value: Argument, torch_device: torch.device) -> tuple[int, int]:
    """(bits, number of bytes) of a kernel argument. Raises ValueError or TypeError for a wrong one."""
    if isinstance(value, torch.Tensor):
        if value.device != torch_device:
            raise ValueError(
                f"{kernel}: argument {position} must be a tensor on {torch_device} (got {value.device})"
            )
        if not value.is_contiguous():
            raise ValueError(
                f"{kernel}: argument {position} has strides {value.stride()}: call .contiguous()"
            )
        return value.data_ptr(), 8
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{kernel}: argument {position} must fit in 64 bits (got {value})")
        return value & _ALL_BITS, 8
    if isinstance(value, np.uint32 | np.int32 | np.uint64 | np.float32 | np.float64):
        return int.from_bytes(value.tobytes(), sys.byteorder), value.nbytes
    raise TypeError(
        f"{kernel}: argument {position} must be a tensor, an int (8 bytes) or NumPy's uint32, int32, uint64, "
        f"float32 or float64 (got {type(value).__name__})"
    )
