"""PinnedGraph: one relation's topology in memory that a GPU reads in place (UVA). Made by EpochLoader."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from gids.sampler.device.held import Held, OnDevice, OnHost, Original
from gids.store.names import describe_type

if TYPE_CHECKING:
    from gids.cuda import Device, Stream
    from gids.store.graph import Graph

_ON_DEVICE: dict[str, tuple[str, ...]] = {"host": (), "indptr": ("indptr",), "device": ("indptr", "indices")}
"""The arrays that are in device memory, by topology_on."""
_OR_ON_DEVICE = ", or keep the topology on the device (topology_on='device')"
_SHARE_OF_DEVICE = 8
"""By default indptr, then indices, go to the device if they take at most an eighth of its free memory."""


class PinnedGraph:
    """A Graph copied to page-locked host memory that a device reads by zero-copy.

    The copy is anonymous memory of its exact size, rounded up to a page. Indices are int32 if the
    sources' ids fit, which halves the bus traffic. Close it, or use it in a ``with`` block; dropping it
    closes it too. Closing waits for the kernels that were launched to read it.

    Attributes: graph; device; indptr_address, indices_address: for kernels; wide: whether indices are int64
    in the copy; host_bytes, device_bytes: memory of the copy; closed.
    """

    def __init__(self, graph: Graph, device: Device, *, topology_on: str = "auto") -> None:
        """Copy the topology to memory that the GPU reads in place. Blocks while it copies.

        device: a device from `gids.cuda.open_device`. topology_on: "host": indptr and indices in pinned host
        memory; "indptr": indptr in device memory; "device": both in device memory; "auto": the last of these
        that takes at most an eighth of the free device memory. edge_ids are not copied.

        Raises ValueError for another topology_on, MemoryError if host or device memory is short,
        RuntimeError if the driver refuses to pin memory.
        """
        if topology_on not in ("auto", *_ON_DEVICE):
            raise ValueError(f"topology_on must be auto, host, indptr or device (got {topology_on!r})")
        self.graph = graph
        self.device = device
        self.wide = graph.num_src > np.iinfo(np.int32).max
        sources = [
            Original("indptr", graph.indptr, np.dtype(np.int64)),
            Original("indices", graph.indices, np.dtype(np.int64 if self.wide else np.int32)),
        ]
        if topology_on == "auto":
            topology_on = _choose(sources, device)
        _check_memory(graph, device, sources, topology_on)
        held: list[Held] = []
        self._arrays: dict[int, Held] = {}  # by the id of the array
        self._streams: list[Stream] = []
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._streams, held, self._arrays)
        try:
            for source in sources:
                if source.name in _ON_DEVICE[topology_on]:
                    held.append(OnDevice(device, source))
                else:
                    what = f"{source.name} of {describe_type(graph.relation)}"
                    held.append(OnHost(device, source, what, _OR_ON_DEVICE))
        except BaseException:
            self._finalizer()
            raise
        self.indptr_address, self.indices_address = (h.address for h in held)
        self._topology = tuple(held)

    def used_on(self, stream: Stream) -> None:
        """Note that kernels on this stream read the copy. Called before they are launched."""
        if stream not in self._streams:
            self._streams.append(stream)

    @property
    def indptr_on_host(self) -> bool:
        return isinstance(self._topology[0], OnHost)

    @property
    def indices_on_host(self) -> bool:
        return isinstance(self._topology[1], OnHost)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory of the topology and the weights that are held."""
        return sum(h.nbytes for h in self._all_held() if isinstance(h, OnHost))

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory of the topology and the weights that are held."""
        return sum(h.nbytes for h in self._all_held() if isinstance(h, OnDevice))

    def array(self, values: np.ndarray, what: str) -> int:
        """The address, for kernels, of a copy of values of edges or nodes. what: "weights" or "times".

        The first call copies them: to device memory if indices are there and an eighth of the free memory is
        enough, else to pinned host memory. The copy is held until the array is gone or this is closed. Raises
        MemoryError and RuntimeError like the constructor.
        """
        key = id(values)
        if key not in self._arrays:
            source = Original(what, values, values.dtype)
            relation = describe_type(self.graph.relation)
            indices = self._topology[1]
            if isinstance(indices, OnDevice) and source.nbytes <= _room(self.device):
                self._arrays[key] = OnDevice(self.device, source)
            else:
                _check_host_memory(f"pinning the {what} of {relation}", [source], "free some")
                self._arrays[key] = OnHost(self.device, source, f"{what} of {relation}", "")
            weakref.finalize(values, _release_one, os.getpid(), self._streams, self._arrays, key)
        return self._arrays[key].address

    def _all_held(self) -> list[Held]:
        return [*self._topology, *self._arrays.values()]

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Wait for the kernels that read the copy, unmap and free it. Idempotent."""
        self._finalizer()

    def __enter__(self) -> PinnedGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = f"{self.host_bytes} bytes of host memory, {self.device_bytes} of device memory"
        return f"PinnedGraph({describe_type(self.graph.relation)}, {'closed' if self.closed else sizes})"


def _release(pid: int, streams: list[Stream], held: list[Held], weights: dict[int, Held]) -> None:
    if os.getpid() == pid:  # a forked child has none of the streams
        for stream in streams:
            stream.synchronize()
    while held:
        held.pop().release()
    while weights:
        weights.popitem()[1].release()


def _release_one(pid: int, streams: list[Stream], weights: dict[int, Held], key: int) -> None:
    if key in weights:
        one = {key: weights.pop(key)}
        _release(pid, streams, [], one)


def _room(device: Device) -> int:
    return device.memory_info()[0] // _SHARE_OF_DEVICE


def _choose(sources: list[Original], device: Device) -> str:
    room = _room(device)
    sizes = {on: sum(s.nbytes for s in sources if s.name in names) for on, names in _ON_DEVICE.items()}
    return max((on for on, nbytes in sizes.items() if nbytes <= room), key=sizes.__getitem__)


def _check_memory(graph: Graph, device: Device, sources: list[Original], topology_on: str) -> None:
    what = f"pinning the topology of {describe_type(graph.relation)}"
    on_device = [s for s in sources if s.name in _ON_DEVICE[topology_on]]
    on_host = [s for s in sources if s.name not in _ON_DEVICE[topology_on]]
    wanted, (free, _) = sum(s.nbytes for s in on_device), device.memory_info()
    if wanted > free:
        raise MemoryError(
            f"{what} needs {_listing(on_device)} = {wanted} bytes of device memory, but {free} are free: "
            "leave more on the host (topology_on='indptr' or 'host')"
        )
    _check_host_memory(what, on_host, "free some, or keep all of it on the device (topology_on='device')")


def _check_host_memory(what: str, sources: list[Original], advice: str) -> None:
    wanted, available = sum(s.nbytes for s in sources), _available_bytes()
    if wanted > available:
        raise MemoryError(
            f"{what} needs {_listing(sources)} = {wanted} bytes of host memory, but {available} are "
            f"available (MemAvailable of /proc/meminfo): {advice}"
        )


def _listing(sources: list[Original]) -> str:
    return " + ".join(f"{s.name} {s.nbytes}" for s in sources)


def _available_bytes() -> int:
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
