"""Opens the files of a source, which nobody checked. Called by the readers.

Only regular files are opened: a FIFO or a device would block, or never end. What is read whole is bounded.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from gids.errors import FormatError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """A regular file, to read. Raises FormatError for anything else, and OSError."""
    check_file(path)  # opening a socket fails, and opening some devices acts
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_mode(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_file(path: Path) -> None:
    """For libraries that open a file themselves: raise FormatError unless it is a regular one."""
    if "\0" in os.fspath(path):
        raise FormatError(f"{os.fspath(path)!r} cannot be the path of a file: it holds a NUL")
    _check_mode(path, os.stat(path).st_mode)


def read_file(path: Path, most_bytes: int, what: str) -> bytes:
    """All of a file that must be small. Raises FormatError for a larger one; what: "metadata"."""
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise FormatError(f"{path} has more than {most_bytes} bytes, the most that {what} may have")
    return data


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file")
