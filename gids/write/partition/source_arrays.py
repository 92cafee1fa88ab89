"""Reads, checks and copies the arrays of the dataset that is divided. Called by the other files here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from gids import _core
from gids.errors import StorageError
from gids.store.array_checks import file_crc32c
from gids.store.files import Locator, array_rows, map_array
from gids.store.manifest import ArrayEntry
from gids.store.rows import read_range
from gids.stored_file import AnyFile, StoredFile, open_descriptor
from gids.write.sync import sync_files

_BLOCK_BYTES = 8 << 20


class SourceArrays:
    """The arrays of a dataset, by their entries in its manifest."""

    def __init__(self, locate: Locator) -> None:
        self._locate = locate

    def path(self, entry: ArrayEntry) -> StoredFile:
        return self._locate.array(entry)

    def mapped(self, entry: ArrayEntry) -> np.ndarray:
        return map_array(self.path(entry), entry)

    def read(self, entry: ArrayEntry, first: int, last: int) -> np.ndarray:
        """Elements first … last, in new memory; the file does not stay in the page cache."""
        values: np.ndarray = read_range(array_rows(self.path(entry), entry), first, last).numpy()
        return values

    def check(self, entry: ArrayEntry) -> None:
        """Raise StorageError if the array is damaged."""
        if file_crc32c(self.path(entry)) != entry.crc32c:
            raise _damaged(self.path(entry))


def copy_array(
    source: AnyFile,
    entry: ArrayEntry,
    path: str,
    roots: Sequence[Path],
    *,
    at_once: int,
    memory_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Copy an array's file to `path` in each directory, at_once of them in one pass.

    Raises StorageError if the array is damaged.
    """
    buffer = np.empty(min(_BLOCK_BYTES, memory_bytes), np.uint8)
    for first in range(0, max(1, len(roots)), at_once):
        with ExitStack() as stack:
            files = []
            for root in roots[first : first + at_once]:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                files.append(stack.enter_context(open(root / path, "wb", buffering=0)))
            read = stack.enter_context(open(open_descriptor(source), "rb", buffering=0))
            crc = 0
            while count := read.readinto(buffer.data):
                crc = _core.crc32c_extend(crc, buffer[:count])
                for file in files:
                    _write_all(file.fileno(), buffer[:count])
                on_bytes(count if first == 0 else 0)
            sync_files(file.fileno() for file in files)
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if crc != entry.crc32c:
                raise _damaged(source)


def _write_all(fd: int, data: np.ndarray) -> None:
    view = memoryview(data.data)
    while view:
        view = view[os.write(fd, view) :]


def _damaged(path: AnyFile) -> StorageError:
    what = "this array of the dataset fails its CRC32C; `gids verify` lists all faults"
    return StorageError(errno.EBADMSG, what, path)
