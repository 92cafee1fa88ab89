"""Limits the memory of a library while it decodes a part of a source. Called by arrow_table and trial.

A few bytes of a compressed file can become gigabytes, and libraries allocate the size that the file gives.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_guards = 0  # threads within at_most
_limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)  # of this process outside of guards


@contextlib.contextmanager
def at_most(memory_bytes: int | None) -> Iterator[None]:
    """Let allocations fail that add more than memory_bytes to the process (None: no limit).

    Libraries then raise MemoryError or an error of their own. Applies to all threads until the last one
    leaves.
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
    """Private memory of this process in bytes, used or not."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
