"""StoredFile: a file of an open dataset, and the one way to open it. Made by Locator (gids.store.files).

A dataset may be replaced while it is open: then its path, and those of its files, lead to another dataset. So
files are opened through the directory that was opened first, and each must be the file that was seen there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gids.errors import StorageError

AnyFile = str | os.PathLike[str]
"""A path, or a StoredFile."""

Seen = tuple[int, int, int]
"""What a file is recognized by: inode, bytes, time of the last change in ns."""


@dataclass(frozen=True)
class StoredFile(os.PathLike[str]):
    """A file of a dataset. As a path, it is for messages, and for what is the same in any dataset.

    path: the file's. opener: returns a new descriptor; see `Locator.open`.
    """

    path: Path
    opener: Callable[[], int]

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)


def open_descriptor(file: AnyFile) -> int:
    """Open a file for reading. Raises StorageError if it is a dataset's and was replaced, OSError."""
    return file.opener() if isinstance(file, StoredFile) else os.open(file, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def opened(file: AnyFile) -> Iterator[int]:
    """The descriptor of `open_descriptor`, closed at the end of the block."""
    fd = open_descriptor(file)
    try:
        yield fd
    finally:
        os.close(fd)


def file_status(file: AnyFile) -> os.stat_result:
    """os.stat() of what `open_descriptor` opens."""
    with opened(file) as fd:
        return os.fstat(fd)


def seen(status: os.stat_result) -> Seen:
    return status.st_ino, status.st_size, status.st_mtime_ns


class Directory:
    """An open directory: the same one, wherever its path leads by now. The last reference closes it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = path
        weakref.finalize(self, os.close, self.fd)

    def is_at(self, path: Path) -> bool:
        """Whether the path leads to this directory."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path))
        except OSError:
            return False

    def open(self, name: str) -> int:
        with self._naming(name):
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)

    def stat(self, name: str) -> os.stat_result:
        with self._naming(name):
            return os.stat(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the whole path of a file in errors."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path / name)
            raise


def replaced(root: Path, path: Path) -> StorageError:
    """The error for a file of a dataset that was replaced. path: of the file, or of the dataset."""
    return StorageError(errno.ESTALE, f"the dataset {root} was replaced; open it again", path)
