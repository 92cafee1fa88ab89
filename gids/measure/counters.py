"""Memory, reads and CPU time of this process, as the kernel counts them."""

from __future__ import annotations

import resource
from pathlib import Path


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status: "VmRSS", its peak "VmHWM", or its parts "RssAnon" and "RssShmem"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def device_bytes_read() -> int | None:
    """Bytes read from devices for this process, including the kernel's read-ahead. None if hidden."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:  # some containers hide it
        return None
    return int(fields["read_bytes"])


def cpu_seconds() -> float:
    """User and system time of all threads, and of children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
