"""Writes around the page cache, where the file system can. Called by PageWriter.

A direct write copies nothing and leaves nothing in the page cache to be written back later; memory, offset
and size must be multiples of the disk's block. Where they are not, or where nothing can be written so, the
file is written through the page cache from then on.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np


def aligned_zeros(count: int, size_bytes: int) -> np.ndarray:
    """uint8[count, size_bytes] of zeros, C order, on a border of memory pages."""
    memory = mmap.mmap(-1, max(1, count * size_bytes))
    return np.frombuffer(memory, np.uint8, count * size_bytes).reshape(count, size_bytes)


def aligned(pages: np.ndarray) -> np.ndarray:
    """uint8[count, size_bytes] in C order and on a border of memory pages: itself if it is so, or a copy."""
    if pages.flags.c_contiguous and pages.ctypes.data % mmap.PAGESIZE == 0:
        return pages
    copy = aligned_zeros(*pages.shape)
    copy[:] = pages
    return copy


def write_directly(fd: int) -> None:
    """Have a file that is open for writing written around the page cache, if its file system can."""
    _set_direct(fd, on=True)


def write_exactly(fd: int, data: np.ndarray, offset: int) -> None:
    """Write uint8[bytes] at an offset, whole. Raises OSError."""
    view = memoryview(data.data)
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(fd, on=False):
                raise


def _set_direct(fd: int, *, on: bool) -> bool:
    """Whether that changed how the file is written."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True
