"""PinnedGraph: one relation's topology in memory that a GPU reads in place (UVA). Made by EpochLoader.

Each array is copied to device memory, or to page-locked host memory. Several ranks of a machine share one
copy there: the first rank that keeps an array on the host allocates its memory; the others map it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gids.cache.budget import available_bytes
from gids.closing import Closing
from gids.cuda.host_memory import SharedFile, host_memory, open_shared, share_memory
from gids.store.names import describe_type

if TYPE_CHECKING:
    import torch

    from gids.cuda import Device, Mapping, Stream
    from gids.store.feature_store import Graph

_ON_DEVICE: dict[str, tuple[str, ...]] = {"host": (), "indptr": ("indptr",), "device": ("indptr", "indices")}
"""The arrays that are in device memory, by topology_on."""
_OR_ON_DEVICE = ", or keep the topology on the device (topology_on='device')"
_SHARE_OF_DEVICE = 8
"""By default indptr, then indices, go to the device if they take at most an eighth of its free memory."""
_COPIED_AT_ONCE = 64 << 20
log = logging.getLogger("gids")


class PinnedGraph(Closing):
    """A Graph copied to page-locked host memory that a device reads by zero-copy.

    The copy is anonymous memory of its exact size, rounded up to a page. Indices are int32 if the
    sources' ids fit, which halves the bus traffic. Close it, or use it in a ``with`` block; dropping it
    closes it too. Closing waits for the kernels that were launched to read it.

    Ranks of one machine can share one copy in host memory, which is freed when the last of them closes it or
    ends.

    Attributes: graph; device; indptr_address, indices_address: for kernels; wide: whether indices are int64
    in the copy; host_bytes, borrowed_bytes, device_bytes: memory of the copy; over_bus; closed.
    """

    def __init__(
        self, graph: Graph, device: Device, *, topology_on: str = "auto", peers: Peers | None = None
    ) -> None:
        """Copy the topology to memory that the GPU reads in place. Blocks while it copies.

        device: a device from `gids.cuda.open_device`. topology_on: "host": indptr and indices in pinned host
        memory; "indptr": indptr in device memory; "device": both in device memory; "auto": the last of these
        that takes at most an eighth of the free device memory. edge_ids are not copied. peers: ranks of this
        machine that pin the same graph now; arrays that several of them keep on the host are copied once.

        Raises ValueError for another topology_on, MemoryError if host or device memory is short,
        RuntimeError if the driver refuses to pin memory, RankError if a peer fails.
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
        what = describe_type(graph.relation)
        pinning = f"pinning the topology of {what}"
        on_device = [s for s in sources if s.name in _ON_DEVICE[topology_on]]
        on_host = [s for s in sources if s.name not in _ON_DEVICE[topology_on]]
        _check_device_memory(pinning, on_device, device)
        advice = "free some, or keep all of it on the device (topology_on='device')"
        check = partial(_check_host_memory, pinning, advice=advice)
        shared = {} if peers is None or peers.size == 1 else share(peers, device, on_host, what, check)
        held: dict[str, Held] = {name: s.memory for name, s in shared.items()}
        self._arrays: dict[int, Held] = {}  # by the id of the array
        self._streams: list[Stream] = []
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._streams, held, self._arrays)
        try:
            check([s for s in on_host if s.name not in shared])
            for source in sources:
                if source.name in shared:
                    memory, first, step = shared[source.name]
                    memory.fill(source, first, step)
                elif source.name in _ON_DEVICE[topology_on]:
                    held[source.name] = OnDevice(device, source)
                else:
                    held[source.name] = OnHost(device, source, f"{source.name} of {what}", _OR_ON_DEVICE)
            if peers is not None:
                peers.gather(lambda: None, "filled the topology")
        except BaseException:
            self._finalizer()
            raise
        self._topology = (held["indptr"], held["indices"])
        self.indptr_address, self.indices_address = (h.address for h in self._topology)

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
        """Bytes of pinned host memory of the topology and the weights that this process allocated."""
        return sum(h.nbytes for h in self._all_held() if isinstance(h, OnHost) and not h.borrowed)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of pinned host memory that a peer allocated."""
        return sum(h.nbytes for h in self._all_held() if isinstance(h, OnHost) and h.borrowed)

    @property
    def over_bus(self) -> bool:
        """Whether a part is in host memory, which the device reads over the bus."""
        return any(isinstance(h, OnHost) for h in self._all_held())

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

    def __repr__(self) -> str:
        of_peer = f" and {self.borrowed_bytes} of another rank" if self.borrowed_bytes else ""
        sizes = f"{self.host_bytes} bytes of host memory{of_peer}, {self.device_bytes} of device memory"
        return f"PinnedGraph({describe_type(self.graph.relation)}, {'closed' if self.closed else sizes})"


def _release(pid: int, streams: list[Stream], held: dict[str, Held], weights: dict[int, Held]) -> None:
    if os.getpid() == pid:  # a forked child has none of the streams
        for stream in streams:
            stream.synchronize()
    while held:
        held.popitem()[1].release()
    while weights:
        weights.popitem()[1].release()


def _release_one(pid: int, streams: list[Stream], weights: dict[int, Held], key: int) -> None:
    if key in weights:
        one = {key: weights.pop(key)}
        _release(pid, streams, {}, one)


def _room(device: Device) -> int:
    return device.memory_info()[0] // _SHARE_OF_DEVICE


def _choose(sources: list[Original], device: Device) -> str:
    room = _room(device)
    sizes = {on: sum(s.nbytes for s in sources if s.name in names) for on, names in _ON_DEVICE.items()}
    return max((on for on, nbytes in sizes.items() if nbytes <= room), key=sizes.__getitem__)


def _check_device_memory(what: str, sources: list[Original], device: Device) -> None:
    free, cure = device.memory_info()[0], "leave more on the host (topology_on='indptr' or 'host')"
    _check_memory(what, sources, free, f"device memory, but {free} are free: {cure}")


def _check_host_memory(what: str, sources: list[Original], advice: str) -> None:
    free = available_bytes()
    where = "available on this machine or in this process's control group (container)"
    _check_memory(what, sources, free, f"host memory, but {free} are {where}: {advice}")


def _check_memory(what: str, sources: list[Original], free: int, rest: str) -> None:
    if (wanted := sum(s.nbytes for s in sources)) > free:
        listing = " + ".join(f"{s.name} {s.nbytes}" for s in sources)
        raise MemoryError(f"{what} needs {listing} = {wanted} bytes of {rest}")


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


class Peers(Protocol):
    """Ranks of one machine that pin the same graphs. rank, size: this one's number, and how many they are."""

    rank: int
    size: int

    def gather(self, say: Callable[[], Any], place: str) -> list[Any]:
        """What each rank says, plain values. Collective. Raises the error of say(), and RankError if another
        rank failed, ended or stalls."""

    def name_of(self, rank: int) -> str:
        """How errors and logs call a rank."""


class Shared(NamedTuple):
    """Pinned memory, of which this rank fills every step-th part, from the first one on."""

    memory: OnHost
    first: int
    step: int


def share(
    peers: Peers,
    device: Device,
    sources: Sequence[Original],
    relation: str,
    check: Callable[[list[Original]], None],
) -> dict[str, Shared]:
    """Pinned memory by name, of those arrays that other ranks keep on the host too. Collective.

    sources: the arrays that this rank keeps on the host. check: raises MemoryError if memory is short; it is
    asked about arrays that this rank allocates. When the ranks have filled the memory, they must meet once
    more.

    Returns nothing if a rank cannot use the memory; the first rank logs why. Raises MemoryError, and
    RankError if another rank fails.
    """
    wanted = peers.gather(lambda: [s.name for s in sources], "shares a topology")
    named = sorted({name for names in wanted for name in names})
    users = {name: [i for i, names in enumerate(wanted) if name in names] for name in named}
    users = {name: ranks for name, ranks in users.items() if len(ranks) > 1}
    if not users:
        return {}
    sources = [s for s in sources if s.name in users]
    mine = [s for s in sources if users[s.name][0] == peers.rank]
    held: dict[str, OnHost] = {}
    files: dict[str, SharedFile] = {}
    try:

        def make() -> dict[str, Any]:
            check(mine)
            refusal = _attempt(lambda: _make(mine, device, relation, held, files))
            return {"files": files, "refusal": refusal}

        told = peers.gather(make, "allocated a topology")
        refusal = told[peers.rank]["refusal"]
        if all(said["refusal"] is None for said in told):
            theirs = {s.name: SharedFile(*told[users[s.name][0]]["files"][s.name]) for s in sources}
            refusal = _attempt(lambda: _borrow(sources, theirs, device, relation, held))
        refusals = peers.gather(lambda: refusal, "opened a topology")
    except BaseException:
        _release_shared(held)
        raise
    finally:
        for file in files.values():
            os.close(file.descriptor)
    if all(r is None for r in refusals):
        at = {s.name: users[s.name].index(peers.rank) for s in sources}
        return {name: Shared(memory, at[name], len(users[name])) for name, memory in held.items()}
    _release_shared(held)
    # The memory is free before anyone looks for memory of its own.
    peers.gather(lambda: None, "shares no topology")
    if peers.rank == 0:
        why = "; ".join(f"{peers.name_of(i)}: {r}" for i, r in enumerate(refusals) if r is not None)
        log.warning(
            "the ranks of this machine do not share the topology of %s, and each copies it (%s)",
            relation,
            why,
        )
    return {}


def _attempt(work: Callable[[], None]) -> str | None:
    """Why this rank cannot share memory, or None."""
    try:
        work()
    except (OSError, RuntimeError) as error:  # the kernel, or the driver, refuses
        return str(error)
    return None


def _make(
    sources: Sequence[Original],
    device: Device,
    relation: str,
    held: dict[str, OnHost],
    files: dict[str, SharedFile],
) -> None:
    for source in sources:
        what, nbytes = f"{source.name} of {relation}", source.bytes_in_pages
        try:
            memory, files[source.name] = share_memory(nbytes, device.numa_node)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):  # copies of their own would take more
                raise MemoryError(f"{what}: {no_memory(nbytes, error)}") from None
            raise
        held[source.name] = OnHost(device, source, what, "", memory)
        del memory


def _borrow(
    sources: Sequence[Original],
    files: dict[str, SharedFile],
    device: Device,
    relation: str,
    held: dict[str, OnHost],
) -> None:
    for source in sources:
        if source.name not in held:
            memory = open_shared(files[source.name], source.bytes_in_pages)
            what = f"{source.name} of {relation}"
            held[source.name] = OnHost(device, source, what, "", memory, borrowed=True)
            del memory


def _release_shared(held: dict[str, OnHost]) -> None:
    while held:
        held.popitem()[1].release()
