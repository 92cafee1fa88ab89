"""Bounds what a library may allocate while it decodes a piece of a source. Called by arrow_table and trial.

A few bytes of a compressed file can stand for gigabytes, and libraries allocate what the file says.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_guards = 0  # threads within at_most
_limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)  # this process's own, while there are


@contextlib.contextmanager
def at_most(memory_bytes: int | None) -> Iterator[None]:
    """Within it, an allocation that takes this process beyond what it holds now and so many bytes fails.

    The libraries raise MemoryError then, or an error of their own. It holds for all threads of the process,
    until the last one leaves. None: no bound.
    """
    global _guards, _limits
    if memory_bytes is None:
        yield
        return
    with _lock:
        if not _guards:
            _limits = resource.getrlimit(resource.RLIMIT_DATA)
        _guards += 1
        limit = allocated_bytes() + memory_bytes
        own, most = _limits
        resource.setrlimit(resource.RLIMIT_DATA, (limit if own < 0 else min(limit, own), most))
    try:
        yield
    finally:
        with _lock:
            _guards -= 1
            if not _guards:
                resource.setrlimit(resource.RLIMIT_DATA, _limits)


def allocated_bytes() -> int:
    """Private memory of this process, whether it is in use or not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
