"""Opens files and zip files of a source, which may be hostile. Called by the readers.

Opens regular files only: a FIFO or a device may block or never end.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

from gids.convert.damage import parsing, shown
from gids.errors import FormatError

MAX_DIRECTORY_BYTES = 8 << 20  # of a zip file: about 100,000 members, which need 100 MB of memory

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file to read. Raises FormatError for anything else, and OSError."""
    check_file(path)  # opening a socket fails, and opening some devices has effects
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_mode(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_file(path: Path) -> None:
    """Raise FormatError unless a path is a regular file. For libraries that open files themselves."""
    if "\0" in os.fspath(path):
        raise FormatError(f"{os.fspath(path)!r} cannot be a path: it has a NUL")
    _check_mode(path, os.stat(path).st_mode)


def read_file(path: Path, most_bytes: int, what: str) -> bytes:
    """The content of a file. Raises FormatError if it has more than most_bytes. what: its name there."""
    with open_file(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise FormatError(f"{path} has more than {most_bytes} bytes, the limit for {what}")
    return data


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'not a file')}; it must be a regular file"
        )


@contextlib.contextmanager
def open_zip(path: Path, fault: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file to read. fault: such as "is not a valid .npz file".

    Raises FormatError for damage, also within the block, and for two members of one name.
    """
    with open_file(path) as file, parsing(path, fault):
        bounded = _BoundedReads(file.raw)
        with zipfile.ZipFile(bounded) as archive:
            bounded.max_bytes = None
            names = set()
            for name in archive.namelist():
                if name in names:
                    raise FormatError(f"{path} has two members {shown(name)}")
                names.add(name)
            yield archive


class _BoundedReads(io.BufferedReader):
    """A zip file with a limit for each read, until max_bytes is None."""

    max_bytes: int | None = MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if self.max_bytes is None:
            return super().read(size)
        size = self.max_bytes + 1 if size is None or size < 0 else min(size, self.max_bytes + 1)
        data = super().read(size)
        if len(data) > self.max_bytes:
            raise ValueError(f"it has too many members: its directory has more than {self.max_bytes} bytes")
        return data
