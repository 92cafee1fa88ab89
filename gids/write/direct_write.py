"""Direct writes, without the page cache, if the file system supports them. Called by PageWriter.

A direct write makes no copy and leaves nothing in the page cache. Memory, offset and size must be multiples
of the disk's block size. If they are not, or direct writes fail, the file is written through the page cache
from then on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np


def aligned_zeros(count: int, size_bytes: int) -> np.ndarray:
    """uint8[count, size_bytes] of zeros, C order, aligned to memory pages."""
    memory = mmap.mmap(-1, max(1, count * size_bytes))
    return np.frombuffer(memory, np.uint8, count * size_bytes).reshape(count, size_bytes)


def write_directly(fd: int) -> None:
    """Switch an open file to direct writes, if its file system supports them."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def write_exactly(fd: int, data: np.ndarray, offset: int) -> None:
    """Write all of uint8[bytes] at an offset. Any thread may call. Raises OSError."""
    view = memoryview(data.data)
    done, may_be_direct = 0, True
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not may_be_direct:
                raise
            may_be_direct = False  # another thread may do the same at the same time
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
