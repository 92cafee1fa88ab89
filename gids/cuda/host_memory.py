"""Host memory that a device reads and writes in place. Used by PinnedGraph, io and cache.

It belongs to one process, or is shared with others of the machine. Shared memory has no name: it is freed
when the last process unmaps it or ends, however it ends. Memory is on the NUMA node of the GPU, which then
reads it without crossing to another socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import platform
import weakref
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_MFD_CLOEXEC, _MAP_FIXED, _MADV_POPULATE_WRITE = 1, 0x10, 23
_log = logging.getLogger("gids")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED, _MOVE = 1, 2  # MPOL_PREFERRED, MPOL_MF_MOVE
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class SharedFile(NamedTuple):
    """How other processes find shared memory: the maker's process id, file descriptor, and the file."""

    pid: int
    descriptor: int
    device: int
    inode: int


def host_memory(nbytes: int, numa_node: int | None = None) -> mmap.mmap:
    """Zeroed memory of at least one byte, aligned to a memory page, on huge pages if the kernel has them.

    numa_node: the node whose memory is taken first (Device.numa_node). A forked child does not inherit it;
    dropping it there is safe. Raises OSError if there is no memory.
    """
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _prepare(memory, numa_node)
    return memory


def share_memory(nbytes: int, numa_node: int | None = None) -> tuple[mmap.mmap, SharedFile]:
    """Memory like host_memory()'s that open_shared() maps in other processes. All of it is allocated now.

    The caller closes the file descriptor when the others have opened it. Raises OSError: ENOSPC or ENOMEM if
    there is no memory, another one if the kernel does not let this process share memory.
    """
    descriptor = _file_in_memory()
    try:
        os.ftruncate(descriptor, max(1, nbytes))
        memory = _map_file(descriptor, max(1, nbytes))
        _prepare(memory, numa_node)
        _allocate(memory, descriptor)
        status = os.fstat(descriptor)
        return memory, SharedFile(os.getpid(), descriptor, status.st_dev, status.st_ino)
    except BaseException:
        os.close(descriptor)
        raise


def open_shared(file: SharedFile, nbytes: int) -> mmap.mmap:
    """Map the memory that share_memory(nbytes) made in a process of the same machine. A forked child does not
    inherit it.

    Its NUMA node is the maker's. Raises OSError if this process may not open it, or if it is not there.
    """
    path = f"/proc/{file.pid}/fd/{file.descriptor}"
    status = os.stat(path)  # before it is opened: another process may have this id by now
    if (status.st_dev, status.st_ino, status.st_size) != (file.device, file.inode, max(1, nbytes)):
        raise FileNotFoundError(f"{path} is not the shared memory of {nbytes} bytes")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = _map_file(descriptor, max(1, nbytes))
    finally:
        os.close(descriptor)
    _prepare(memory, None)
    return memory


def _file_in_memory() -> int:
    """The descriptor of a new file without a name. Not by os, which has no memfd_create in many builds."""
    try:
        create = _libc().memfd_create
    except AttributeError:
        raise OSError(errno.ENOSYS, "this C library has no memfd_create") from None
    descriptor: int = create(b"gids", ctypes.c_uint(_MFD_CLOEXEC))
    return descriptor if descriptor >= 0 else _fail()


def _map_file(descriptor: int, nbytes: int) -> mmap.mmap:
    """A shared mapping of a file. Unlike mmap's own, it does not keep the file open."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # reserves the addresses
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    place = _libc().mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if place(_address(memory), nbytes, protection, flags, descriptor, 0) != _address(memory):
        _fail()
    return memory


def _allocate(memory: mmap.mmap, descriptor: int) -> None:
    """Give shared memory its pages. If there are none left, writing to it would be a SIGBUS."""
    span = ctypes.c_void_p(_address(memory)), ctypes.c_size_t(len(memory))
    if _libc().madvise(*span, ctypes.c_int(_MADV_POPULATE_WRITE)):
        # Linux before 5.14, or no memory, which this says by its errno. It takes no huge pages on advice.
        os.posix_fallocate(descriptor, 0, len(memory))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fail() -> NoReturn:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _prepare(memory: mmap.mmap, numa_node: int | None) -> None:
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):  # hints: a kernel without them still works
            with contextlib.suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    if numa_node is not None:
        prefer_node(_address(memory), len(memory), numa_node)
    _mapped.add(memory)


def _keep_for_ever() -> None:
    """In a forked child, unmapping would free other memory at these addresses."""
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_for_ever)


def numa_node(pci_address: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node that a PCI device is on. pci_address: "0000:3b:00.0".

    None if the kernel does not report it.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int | None) -> bool:
    """Have the kernel take the pages of a mapping from a node while it has free ones, then from the others.

    address: of the start of a memory page. Pages that exist are moved. node: None does nothing. Returns
    whether the kernel agreed; if not, the memory works all the same, and the reason is logged once.
    """
    number = _MBIND.get(platform.machine())
    if node is None or number is None or nbytes <= 0:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _WORD_BITS
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)  # the kernel reads one bit less
    span = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    policy = ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(_MOVE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *span, *policy):
        _tell(node, os.strerror(ctypes.get_errno()))
        return False
    return True


@functools.cache
def _tell(node: int, why: str) -> None:
    _log.info("host memory is not placed on NUMA node %d of the GPU: %s", node, why)
