"""Checks that the disks have enough space before anything is written. Called by all that write."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gids.errors import StorageError
from gids.sizes import format_bytes


def total_bytes(needed: Iterable[tuple[Path, int]]) -> int:
    """The total number of bytes to be written."""
    return sum(size_bytes for _, size_bytes in needed)


def check_space(needed: Iterable[tuple[Path, int]], written: Iterable[Path]) -> None:
    """Raise StorageError (ENOSPC) if a file system has too little space.

    needed: (directory, bytes to be written there). written: directories whose files are already written, when
    a conversion resumes.
    """
    totals: Counter[int] = Counter()
    directories: dict[int, Path] = {}
    for directory, size_bytes in needed:
        device = directory.stat().st_dev
        totals[device] += size_bytes
        directories.setdefault(device, directory)
    for root in written:
        for file in root.rglob("*"):
            if file.is_file():
                status = file.stat()
                totals[status.st_dev] -= status.st_blocks * 512
    for device, directory in directories.items():
        disk = os.statvfs(directory)
        free = disk.f_bavail * disk.f_frsize
        if totals[device] > free:
            message = (
                f"not enough room, and nothing more was written: {format_bytes(totals[device])} needed, "
                f"{format_bytes(free)} free on the disk of"
            )
            raise StorageError(errno.ENOSPC, message, directory)
