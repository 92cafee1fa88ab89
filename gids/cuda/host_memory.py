"""Host memory that a device reads and writes in place. Made by PinnedGraph, and by owners in io and cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def host_memory(nbytes: int) -> mmap.mmap:
    """Zeroed memory of at least one byte, from the start of a page, on huge pages where the kernel has them.

    A forked child does not inherit it, and may let go of it at any time. OSError when there is none.
    """
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):  # hints: a kernel without them still works
            with contextlib.suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    _mapped.add(memory)
    return memory


def _keep_for_ever() -> None:
    """In a forked child: unmapping would hit whatever it has at these addresses."""
    for memory in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


os.register_at_fork(after_in_child=_keep_for_ever)
