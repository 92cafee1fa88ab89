"""PinnedGraph: one relation's topology where a GPU reads it in place (UVA). Made by Graph.pin, used by
gids.sampler.

Knows what it needs of a device from its methods alone; gids.cuda comes after this part.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gids.store.names import describe_type

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device, Mapping
    from gids.store.graph import Graph

_COPIED_AT_ONCE = 64 << 20
_SHARE_OF_DEVICE = 8
"""By default indptr is placed on the device where that takes at most an eighth of its free memory."""


class PinnedGraph:
    """A Graph copied to page-locked host memory that a device reads by zero-copy.

    The copy is anonymous memory of its exact size, rounded up to a page. Close it, or use it in a ``with``
    block; dropping it closes it too. Do so only when the device is done with what samples from it.

    Attributes: graph; device; indptr_address, indices_address: what kernels take; host_bytes, device_bytes:
    what this copy takes of either memory; closed.
    """

    def __init__(self, graph: Graph, device: Device, place: str) -> None:
        self.graph = graph
        self.device = device
        self.host_bytes = self.device_bytes = 0
        on_device = {
            "host": (),
            "indptr": ("indptr",),
            "device": ("indptr", "indices"),
            "auto": ("indptr",) if _is_small(graph.indptr, device) else (),
        }[place]
        arrays = {"indptr": graph.indptr, "indices": graph.indices}
        on_host = {name: array for name, array in arrays.items() if name not in on_device}
        _check_memory(graph, device, {name: arrays[name] for name in on_device}, on_host)
        held: list[_Held] = []
        self._finalizer = weakref.finalize(self, _release, held)
        try:
            for name in on_device:
                held.append(_OnDevice(device, arrays[name]))
                self.device_bytes += held[-1].nbytes
            for name, array in on_host.items():
                held.append(_OnHost(device, array, f"{name} of {describe_type(graph.relation)}"))
                self.host_bytes += held[-1].nbytes
        except BaseException:
            self._finalizer()
            raise
        addresses = dict(zip((*on_device, *on_host), (h.address for h in held), strict=True))
        self.indptr_address = addresses["indptr"]
        self.indices_address = addresses["indices"]

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Unmap and free the copy. Idempotent. The caller has waited for the device's last use."""
        self._finalizer()

    def __enter__(self) -> PinnedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed"
            if self.closed
            else f"{self.host_bytes} bytes of host memory, {self.device_bytes} of device"
        )
        return f"PinnedGraph({describe_type(self.graph.relation)}, {state})"


class _Held:
    """Memory that holds an array: where the device finds it, what it takes, how to let go."""

    address: int
    nbytes: int
    release: Callable[[], None]


class _OnDevice(_Held):
    def __init__(self, device: Device, array: np.ndarray) -> None:
        import torch

        dtype = torch.int32 if array.dtype == np.int32 else torch.int64
        self._tensor: torch.Tensor | None = device.empty(len(array), dtype)
        step = _COPIED_AT_ONCE // array.itemsize
        for first in range(0, len(array), step):
            piece = np.array(array[first : first + step])  # torch warns of arrays that cannot be written
            self._tensor[first : first + step].copy_(torch.from_numpy(piece))
        device.current_stream().synchronize()  # before another stream reads it
        self.address = self._tensor.data_ptr()
        self.nbytes = self._tensor.nbytes
        self.release = self._release

    def _release(self) -> None:
        self._tensor = None


class _OnHost(_Held):
    def __init__(self, device: Device, array: np.ndarray, what: str) -> None:
        self.nbytes = -(-max(1, array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{what}: no {self.nbytes} bytes of host memory ({error.strerror})") from None
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):  # of hints that a kernel may lack
                with contextlib.suppress(OSError):
                    self._memory.madvise(getattr(mmap, advice))
        first = ctypes.c_char.from_buffer(self._memory)
        address = ctypes.addressof(first)
        del first  # holds the memory open
        copy = np.frombuffer(self._memory, array.dtype, len(array))
        step = _COPIED_AT_ONCE // array.itemsize
        for begin in range(0, len(array), step):
            copy[begin : begin + step] = array[begin : begin + step]
        del copy
        try:
            self._mapping: Mapping = device.map_host(address, self.nbytes)
        except RuntimeError as error:
            self._memory.close()
            raise RuntimeError(
                f"{what}: {self.nbytes} bytes of host memory could not be pinned ({error}). Raise the limit "
                f"of locked memory (`ulimit -l`), or keep the topology on the device (place='device')"
            ) from error
        self.address = self._mapping.device_address
        self.release = self._release

    def _release(self) -> None:
        self._mapping.close()
        self._memory.close()


def _release(held: list[_Held]) -> None:
    while held:
        held.pop().release()


def _is_small(array: np.ndarray, device: Device) -> bool:
    free, _ = device.memory_info()
    return array.nbytes <= free // _SHARE_OF_DEVICE


def _check_memory(
    graph: Graph, device: Device, on_device: dict[str, np.ndarray], on_host: dict[str, np.ndarray]
) -> None:
    def listing(arrays: dict[str, np.ndarray]) -> str:
        return " + ".join(f"{name} {array.nbytes}" for name, array in arrays.items())

    what = f"pinning the topology of {describe_type(graph.relation)}"
    wanted, (free, _) = sum(a.nbytes for a in on_device.values()), device.memory_info()
    if wanted > free:
        raise MemoryError(
            f"{what} takes {listing(on_device)} = {wanted} bytes of device memory, and {free} are free; "
            "leave more on the host (place='indptr' or 'host')"
        )
    wanted, available = sum(a.nbytes for a in on_host.values()), _available_bytes()
    if wanted > available:
        raise MemoryError(
            f"{what} takes {listing(on_host)} = {wanted} bytes of host memory, and {available} are "
            "available; free some, or place all of it on the device (place='device')"
        )


def _available_bytes() -> int:
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
