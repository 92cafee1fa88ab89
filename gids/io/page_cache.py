"""Drops files from the kernel's page cache. Called by benchmarks and tests that start cold."""

from __future__ import annotations

import os
from pathlib import Path


def drop_page_cache(path: str | os.PathLike[str]) -> None:
    """Drop the clean pages of a file, or of every file below a directory, from the page cache.

    Dirty pages are written to the disk first. Pages that a process has mapped stay. Raises OSError.
    """
    root = Path(path)
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if not file.is_file():
            continue
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
