"""The memory of the emulated device: an allocator that keeps released memory, like torch's.

Each tensor belongs to the stream it was allocated on. When it is released, that stream poisons its memory,
and the next tensor of its size there gets it. A tensor that was handed over to other streams is kept until
they have done their work so far. So a kernel that uses released memory, or a missing hand_over, reads poison.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from emulator import EmulatedEvent, EmulatedStream

POISON = 0xA5
KEPT_BYTES, KEPT_COUNT = 128 << 20, 256
"""Released memory beyond this is unmapped, the oldest first: the host has less memory than a GPU."""

Buffer = ctypes.Array[ctypes.c_char]


class Allocation:
    """The memory of one tensor. users: the streams that it was handed over to."""

    def __init__(self, address: int, nbytes: int, stream: EmulatedStream) -> None:
        self.address, self.nbytes, self.stream = address, nbytes, stream
        self.kept = True  # when it is released
        self.users: list[EmulatedStream] = []
        self.events: list[EmulatedEvent] = []

    def fill(self, byte: int) -> None:
        """Enqueue on its stream."""
        self.stream.put(partial(ctypes.memset, self.address, byte, self.nbytes), counts=False)


class EmulatedMemory:
    """allocate, free: of the native library. total_bytes: of the device.

    tensor_bytes: of tensors. waiting_bytes: released, but a stream still uses them. kept_bytes: released and
    ready for the next tensor. peak_bytes: settable; the most that tensors and waiting memory took.
    """

    def __init__(
        self, allocate: Callable[[int, int], int | None], free: Callable[[int], object], total_bytes: int
    ) -> None:
        self._allocate, self._free = allocate, free
        self.total_bytes = total_bytes
        self.tensor_bytes = self.waiting_bytes = self.kept_bytes = self.peak_bytes = 0
        self._tensors: dict[int, Allocation] = {}  # by address
        self._released: deque[Allocation] = deque()  # finalizers append to it, in any thread
        self._waiting: list[Allocation] = []
        self._kept: list[Allocation] = []
        self._lock = threading.RLock()
        self._collects = False
        weakref.finalize(self, _free_all, free, self._kept, self._waiting).atexit = False

    @property
    def unreserved_bytes(self) -> int:
        """What the driver of a GPU would report as free."""
        return self.total_bytes - self.tensor_bytes - self.waiting_bytes - self.kept_bytes

    def take(self, nbytes: int, stream: EmulatedStream, *, zeroed: bool, kept: bool = True) -> Buffer:
        """Memory of one tensor; it is released with the buffer. Raises torch.cuda.OutOfMemoryError.

        kept: whether it is kept for the next tensor then, as torch does.
        """
        with self._lock:
            self.collect()
            one = (self._reuse(nbytes, stream) if kept else None) or self._map(nbytes, stream)
            one.kept = kept
            self._tensors[one.address] = one
            self.tensor_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.tensor_bytes + self.waiting_bytes)
            if zeroed:
                one.fill(0)
            buffer: Buffer = (ctypes.c_char * nbytes).from_address(one.address)
            weakref.finalize(buffer, _release, weakref.ref(self), self._free, one).atexit = False
            return buffer

    def hand_over(self, tensor: torch.Tensor, stream: EmulatedStream) -> None:
        """Keep the memory after its release until the stream has done its work so far."""
        with self._lock:
            one = self._tensors.get(tensor.untyped_storage().data_ptr())
            if one is not None and stream is not one.stream and stream not in one.users:
                one.users.append(stream)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was taken here."""
        return tensor.untyped_storage().data_ptr() in self._tensors

    def collect(self) -> None:
        """Notice what was released. Called before work is enqueued, so that events come before it."""
        with self._lock:
            if self._collects:
                return
            self._collects = True
            try:
                while self._released:
                    one = self._released.popleft()
                    del self._tensors[one.address]
                    self.tensor_bytes -= one.nbytes
                    self.waiting_bytes += one.nbytes
                    one.events = [stream.record_event(counts=False) for stream in one.users]
                    self._waiting.append(one)
                for one in [a for a in self._waiting if all(event.passed for event in a.events)]:
                    self._waiting.remove(one)
                    self.waiting_bytes -= one.nbytes
                    self.kept_bytes += one.nbytes
                    if one.kept:
                        one.fill(POISON)
                        self._kept.append(one)
                    else:
                        self._unmap(one)
                while self.kept_bytes > KEPT_BYTES or len(self._kept) > KEPT_COUNT:
                    self._unmap(self._kept.pop(0))
            finally:
                self._collects = False

    def trim(self) -> None:
        """Unmap the kept memory."""
        with self._lock:
            self.collect()
            while self._kept:
                self._unmap(self._kept.pop())

    def _reuse(self, nbytes: int, stream: EmulatedStream) -> Allocation | None:
        for one in self._kept:
            if one.stream is stream and one.nbytes == nbytes:
                self._kept.remove(one)
                self.kept_bytes -= nbytes
                return Allocation(one.address, nbytes, stream)
        return None

    def _map(self, nbytes: int, stream: EmulatedStream) -> Allocation:
        if nbytes > self.unreserved_bytes:
            for event in [event for one in self._waiting for event in one.events]:
                event.synchronize()
            self.trim()
        if nbytes > self.unreserved_bytes:
            raise torch.cuda.OutOfMemoryError(
                f"{nbytes} bytes on the emulated device: "
                f"{self.unreserved_bytes} of {self.total_bytes} are free"
            )
        address = self._allocate(nbytes, 0)
        if not address:
            raise MemoryError(f"{nbytes} bytes for the emulator")
        return Allocation(address, nbytes, stream)

    def _unmap(self, one: Allocation) -> None:
        self.kept_bytes -= one.nbytes
        one.stream.put(partial(self._free, one.address), counts=False)


def _release(memory: weakref.ref[EmulatedMemory], free: Callable[[int], object], one: Allocation) -> None:
    if (owner := memory()) is not None:
        owner._released.append(one)
    else:
        free(one.address)


def _free_all(free: Callable[[int], object], *lists: list[Any]) -> None:
    for one in [one for allocations in lists for one in allocations]:
        free(one.address)
