"""An array of a relation, copied to device memory or to page-locked host memory. Made by PinnedGraph."""

from __future__ import annotations

import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gids.cuda.host_memory import host_memory

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device, Mapping

_COPIED_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class Original:
    """An array and the dtype of its copy."""

    name: str
    array: np.ndarray
    dtype: np.dtype[np.number]

    @property
    def nbytes(self) -> int:
        return len(self.array) * self.dtype.itemsize

    @property
    def bytes_in_pages(self) -> int:
        """Bytes of the memory pages that the copy takes, at least one."""
        return -(-max(1, self.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def parts(self) -> Iterator[slice]:
        """The array in pieces to copy one at a time."""
        step = _COPIED_AT_ONCE // self.array.itemsize
        for first in range(0, len(self.array), step):
            yield slice(first, min(first + step, len(self.array)))

    def copy(self, part: slice, to: np.ndarray) -> None:
        """Copy a part. Values that do not fit the copy's dtype become -1, which is not an id either."""
        np.copyto(to, self.array[part], casting="same_kind")
        if self.dtype != self.array.dtype:
            to[to != self.array[part]] = -1


class Held(ABC):
    """Memory that holds an array: its address on the device, its size, and its release."""

    address: int
    nbytes: int

    @abstractmethod
    def release(self) -> None: ...


class OnDevice(Held):
    def __init__(self, device: Device, source: Original) -> None:
        import torch

        dtype: torch.dtype = getattr(torch, source.dtype.name)
        self._tensor: torch.Tensor | None = device.empty(len(source.array), dtype)
        for part in source.parts():
            piece = np.empty(part.stop - part.start, source.dtype)
            source.copy(part, piece)
            self._tensor[part].copy_(torch.from_numpy(piece))
        device.current_stream().synchronize()  # before another stream reads it
        self.address = self._tensor.data_ptr()
        self.nbytes = self._tensor.nbytes

    def release(self) -> None:
        self._tensor = None


class OnHost(Held):
    """Page-locked host memory with a copy of an array.

    other_way: added to the error if memory cannot be pinned. memory: shared with other processes, to use in
    place of memory of its own; the caller calls fill(). borrowed: another process allocated it.
    """

    def __init__(
        self,
        device: Device,
        source: Original,
        what: str,
        other_way: str,
        memory: mmap.mmap | None = None,
        *,
        borrowed: bool = False,
    ) -> None:
        self.nbytes, self.borrowed = source.bytes_in_pages, borrowed
        self._copy: np.ndarray | None
        if memory is None:
            try:
                memory = host_memory(self.nbytes, device.numa_node)
            except OSError as error:
                raise MemoryError(f"{what}: {no_memory(self.nbytes, error)}") from None
            self._copy = np.frombuffer(memory, source.dtype, len(source.array))
            self.fill(source)
        else:
            self._copy = np.frombuffer(memory, source.dtype, len(source.array))
        del memory
        try:
            address = self._copy.ctypes.data
            self._mapping: Mapping = device.map_host(address, self.nbytes, memory=self._copy)
        except RuntimeError as error:
            self._copy = None  # even if the error is kept
            raise RuntimeError(
                f"{what}: {self.nbytes} bytes of host memory could not be pinned ({error}): free host memory"
                f"{other_way}"
            ) from error
        self.address = self._mapping.device_address

    def fill(self, source: Original, first: int = 0, step: int = 1) -> None:
        """Copy the array, or every step-th part of it from the first one on."""
        assert self._copy is not None
        for part in itertools.islice(source.parts(), first, None, step):
            source.copy(part, self._copy[part])

    def release(self) -> None:
        self._mapping.close()
        self._copy = None


def no_memory(nbytes: int, error: OSError) -> str:
    return f"cannot allocate {nbytes} bytes of host memory ({error.strerror})"
