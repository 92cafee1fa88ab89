"""What the GPU parts of gids need of a device: memory, streams, launches, waits. Known to io, cache, sampler.

One implementation drives CUDA (gids.cuda.cuda_device); the tests bring another that runs the same kernels on
the host. Nothing outside gids.cuda imports cupy or asks torch whether there is a GPU.
"""

from __future__ import annotations

import collections.abc
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

Argument = torch.Tensor | int | np.uint32 | np.int32 | np.uint64 | np.float32 | np.float64
"""What a kernel takes: a tensor's address, an int as 64 bits, or a NumPy scalar as it is."""


_ALL_BITS = (1 << 64) - 1


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block until the work before the event is done."""

    def query(self) -> bool:
        """Whether the work before the event is done."""


class Stream(Protocol):
    """Work in order, as torch.cuda.Stream."""

    def wait_stream(self, stream: Self, /) -> None:
        """Later work waits for what the other stream holds now."""

    def wait_event(self, event: Event, /) -> None:
        """Later work waits for the event."""

    def record_event(self) -> Event:
        """An event after the work so far."""

    def synchronize(self) -> None:
        """Block until the work so far is done."""


class MadeOn(dict[str, torch.Tensor]):
    """Tensors by name, complete once `stream` is through with its work so far, whatever other streams do."""

    def __init__(self, tensors: collections.abc.Mapping[str, torch.Tensor], stream: Stream) -> None:
        super().__init__(tensors)
        self.stream = stream


class Mapping(ABC):
    """Host memory that the device reads and writes in place; close() ends that.

    device_address: where the device sees the memory's first byte.
    """

    device_address: int

    @abstractmethod
    def close(self) -> None:
        """Unmap. Idempotent. The caller has waited for the device's last access."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Device(ABC):
    """One device. torch_device: where its tensors live. name: the vendor's. sm_count: its multiprocessors."""

    torch_device: torch.device
    name: str
    sm_count: int

    @abstractmethod
    def launch(
        self, stream: Stream, unit: str, kernel: str, blocks: int, threads: int, *args: Argument
    ) -> None:
        """Enqueue a kernel of a unit (a source below native/, "cache/device_cache.cu"). Does not block.

        blocks: 0 enqueues nothing. threads: a multiple of 32, at most 1024. args: a tensor passes its address
        (contiguous, on this device); an int passes 8 bytes; NumPy scalars pass as they are. The caller keeps
        tensors alive, or in this stream's order. ValueError for what no kernel may be given, KeyError for a
        kernel that the unit does not have.
        """

    @abstractmethod
    def preload(self, *units: str) -> None:
        """Compile and load units now rather than at their first launch. Blocks."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream that does not wait for the default stream."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """torch's current stream on this device."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, torch works and allocates on this device and stream."""

    @abstractmethod
    def map_host(self, address: int, nbytes: int, *, read_only: bool = False) -> Mapping:
        """Pin host memory and map it into the device's. address: of a page of memory. Blocks.

        read_only: the device only reads; needed where the memory itself is read-only. The memory must outlive
        the mapping. RuntimeError when the driver refuses: says how much was asked and what limits it.
        """

    @abstractmethod
    def wait_value(self, stream: Stream, address: int, value: int) -> bool:
        """The stream's later work waits until the 8-byte word at a device address, of mapped host memory,
        reaches value (cyclically greater or equal). No processor spins. False, and nothing enqueued, where
        the device cannot: launch a kernel that polls.
        """

    @abstractmethod
    def hand_over(self, tensor: torch.Tensor, from_stream: Stream, to_stream: Stream) -> None:
        """A tensor allocated on one stream is used on another: its memory is not given to anyone else before
        that stream's work so far at the time of its release. Does not order the streams.
        """

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Bytes of device memory: free, in all."""

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device with any contents, allocated on torch's current stream."""
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def zeros(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros on the device, on torch's current stream."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)


def check_grid(kernel: str, blocks: int, threads: int) -> None:
    """ValueError for a grid that no device launches, or that the kernels are not written for."""
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"{kernel}: {threads} threads in a block; take a multiple of 32, at most 1024")
    if not 0 <= blocks < 1 << 31:
        raise ValueError(f"{kernel}: {blocks} blocks; take from 0 to 2**31 - 1")


def check_host_range(address: int, nbytes: int) -> None:
    """ValueError for host memory that does not begin with a page of memory, or is none."""
    if address % mmap.PAGESIZE or nbytes <= 0:
        raise ValueError(
            f"{nbytes} bytes of host memory at {address:#x} cannot be mapped: take some, from the start of a "
            f"page of memory ({mmap.PAGESIZE} bytes)"
        )


def as_word(kernel: str, position: int, value: Argument, torch_device: torch.device) -> tuple[int, int]:
    """What a kernel gets for an argument: its bits, and its bytes. ValueError, TypeError for other things."""
    if isinstance(value, torch.Tensor):
        if value.device != torch_device:
            raise ValueError(
                f"{kernel}: argument {position} is a tensor on {value.device}, the kernel on {torch_device}"
            )
        if not value.is_contiguous():
            raise ValueError(
                f"{kernel}: argument {position} is a tensor with strides {value.stride()}; call .contiguous()"
            )
        return value.data_ptr(), 8
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{kernel}: argument {position} is {value}, which 64 bits do not hold")
        return value & _ALL_BITS, 8
    if isinstance(value, np.uint32 | np.int32 | np.uint64 | np.float32 | np.float64):
        return int.from_bytes(value.tobytes(), sys.byteorder), value.nbytes
    raise TypeError(
        f"{kernel}: argument {position} is {type(value).__name__}; kernels take tensors, int (8 bytes), and "
        "numpy's uint32, int32, uint64, float32, float64"
    )
