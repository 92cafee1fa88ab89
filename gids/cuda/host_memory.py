"""Host memory that a device reads and writes in place. Used by PinnedGraph, io and cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import numpy as np

from gids.cuda.numa import prefer_node

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def host_memory(nbytes: int, numa_node: int | None = None) -> mmap.mmap:
    """Zeroed memory of at least one byte, aligned to a memory page, on huge pages if the kernel has them.

    numa_node: the node whose memory is taken first (Device.numa_node). A forked child does not inherit it;
    dropping it there is safe. Raises OSError if there is no memory.
    """
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):  # hints: a kernel without them still works
            with contextlib.suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    if numa_node is not None:
        prefer_node(np.frombuffer(memory, np.uint8).ctypes.data, len(memory), numa_node)
    _mapped.add(memory)
    return memory


def _keep_for_ever() -> None:
    """In a forked child, unmapping would free other memory at these addresses."""
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_for_ever)
