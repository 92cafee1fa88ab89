"""StoredFile: a file of an open dataset, and the one way to open it. Made by Locator (gids.store.files).

Files are opened through the dataset's directory, which is opened first. So they are those of the dataset that
was opened, wherever its path leads by now.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

AnyFile = str | os.PathLike[str]
"""A path, or a StoredFile."""


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
    """Open a file for reading. Raises StorageError if it is a dataset's and was removed, OSError."""
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


class Directory:
    """An open directory: the same one, wherever its path leads by now. The last reference closes it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = path
        weakref.finalize(self, os.close, self.fd)

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
