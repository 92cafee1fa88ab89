"""Whether the disks have room for a dataset, before anything is written. Called by run.py."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gids.errors import StorageError
from gids.sizes import format_bytes


def total_bytes(needed: Iterable[tuple[Path, int]]) -> int:
    """Bytes that will be written, everywhere."""
    return sum(size_bytes for _, size_bytes in needed)


def check_space(needed: Iterable[tuple[Path, int]], written: Iterable[Path]) -> None:
    """Raise StorageError (ENOSPC) when a file system lacks room.

    needed: (directory, bytes that will be written there). written: directories whose files count as already
    there (a conversion that resumes).
    """
    totals: Counter[int] = Counter()
    places: dict[int, Path] = {}
    for directory, size_bytes in needed:
        device = directory.stat().st_dev
        totals[device] += size_bytes
        places.setdefault(device, directory)
    for root in written:
        for file in root.rglob("*"):
            if file.is_file():
                found = file.stat()
                totals[found.st_dev] -= found.st_blocks * 512
    for device, place in places.items():
        disk = os.statvfs(place)
        free = disk.f_bavail * disk.f_frsize
        if totals[device] > free:
            message = (
                f"not enough room, and nothing more was written: {format_bytes(totals[device])} needed, "
                f"{format_bytes(free)} free on the disk of"
            )
            raise StorageError(errno.ENOSPC, message, place)
