"""The disks behind files, and the requests and io_uring rings that keep them busy.

Called by engine.py and by the benchmarks. Knows block devices as the kernel describes them below /sys, but no
datasets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SYSFS = Path("/sys")

StrPath = str | os.PathLike[str]


DISK_DEPTH = 256
"""Requests in flight that keep a disk busy."""

RING_DEPTH = 64
"""Requests in flight of a ring that is added."""

MOST_DEPTH = 1 << 14
"""Of an engine."""


def core_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ring_count(paths: Iterable[StrPath]) -> int:
    """Number of rings for files at first: one per disk, at most one per core."""
    return min(core_count(), disk_count(paths))


def disk_count(paths: Iterable[StrPath]) -> int:
    """Number of disks that hold files, at least 1."""
    return max(1, len({disk for path in paths for disk in disks_of(path)}))


def disks_of(path: StrPath) -> set[str]:
    """Names of the disks that hold a file. Partitions of one disk are one, an array is all of its disks.

    A file system without a block device (Btrfs, network, memory) counts as one disk. Empty if there is no
    such file.
    """
    try:
        device = device_of(path)
    except OSError:
        return set()
    number = f"{os.major(device)}:{os.minor(device)}"
    block = SYSFS / "dev/block" / number
    return _below(block.resolve()) if block.exists() else {number}


def device_of(path: StrPath) -> int:
    """The number of the device that a file's file system is on."""
    return os.stat(path).st_dev


def _below(block: Path) -> set[str]:
    """The disks under a block device, which is described in a folder of sysfs."""
    if (block / "partition").exists():
        block = block.parent
    parts = [part.resolve() for part in sorted((block / "slaves").glob("*"))]
    return {disk for part in parts for disk in _below(part)} or {block.name}
