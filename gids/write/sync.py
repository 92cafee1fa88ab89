"""Makes files and names durable, so that they survive a loss of power. Called by all that write."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Make the names of all files below root durable. Their data is synced when it is written."""
    for folder, _, _ in os.walk(root):
        sync_directory(Path(folder))


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and make its data durable, not its name. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_files(fds: Iterable[int]) -> None:
    """Sync files and drop them from the page cache. Raises OSError."""
    for fd in fds:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
