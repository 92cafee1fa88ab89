"""Writes files and makes them and their names durable, to survive a loss of power. Called by all writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from gids import _core
from gids.closing import Closing
from gids.errors import StorageError
from gids.sizes import format_bytes
from gids.store.dtypes import ARRAY_DTYPES
from gids.store.files import npy_header
from gids.store.manifest import ArrayEntry
from gids.store.rows import file_crc32c


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(path: Path, open_file: Callable[[], int], *, wait: bool = True) -> int:
    """Open and lock what is at a path, until the descriptor is closed. Returns it.

    Begins again if it was removed or replaced meanwhile. Raises BlockingIOError if another process has it and
    wait is False, OSError.
    """
    while True:
        fd = open_file()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_open_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_open_at(fd: int, path: Path) -> bool:
    """Whether a path still leads to this open file or directory."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


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


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or replace it, in one step that survives a loss of power. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    write_synced(new, data)
    sync_directory(path.parent)
    os.rename(new, path)
    sync_directory(path.parent)


def sync_files(fds: Iterable[int]) -> None:
    """Sync files and drop them from the page cache. Raises OSError."""
    for fd in fds:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def link_file(old: Path, new: Path) -> None:
    """Give a file that never changes a second name; where that is impossible, copy it and sync the copy."""
    new.parent.mkdir(parents=True, exist_ok=True)
    new.unlink(missing_ok=True)
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
        with open(new, "rb") as file:
            sync_files([file.fileno()])


def open_sized(stack: contextlib.ExitStack, path: Path, size_bytes: int) -> int:
    """Make or empty a file, and give it this size. It is open until the stack closes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    return fd


def write_directly(fd: int) -> None:
    """Switch an open file to direct writes, if its file system supports them."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def write_exactly(fd: int, data: np.ndarray, offset: int) -> None:
    """Write all of uint8[bytes] at an offset. Any thread may call. Raises OSError.

    Memory, offset and size of a direct write must be multiples of the disk's block size. If they are not, or
    direct writes fail, the file is written through the page cache from then on.
    """
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


def aligned_zeros(count: int, size_bytes: int) -> np.ndarray:
    """uint8[count, size_bytes] of zeros, C order, aligned to memory pages."""
    memory = mmap.mmap(-1, max(1, count * size_bytes))
    return np.frombuffer(memory, np.uint8, count * size_bytes).reshape(count, size_bytes)


class ArrayFile(Closing):
    """An array that is appended in pieces. Use as a context manager.

    shape: None for one dimension of any length. Then the header is written again at the end, and the file
    is read once more for its checksum.
    """

    def __init__(self, root: Path, path: str, dtype: str, shape: Sequence[int] | None) -> None:
        self._path, self._dtype, self._shape = path, dtype, shape
        self._full = root / path
        self._full.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._full, "wb")  # noqa: SIM115 - see close
        self._crc = self._count = 0
        self._header = npy_header(dtype, (0,) if shape is None else shape)
        self._write(np.frombuffer(self._header, np.uint8))

    def append(self, values: np.ndarray) -> None:
        """Append elements, converted to the array's type, which must represent them exactly."""
        values = np.ascontiguousarray(values, ARRAY_DTYPES[self._dtype])
        self._count += values.size
        if values.size:
            self._write(values.reshape(-1).view(np.uint8))

    def finish(self) -> ArrayEntry:
        """Sync the file and return its entry for the manifest."""
        shape = (self._count,) if self._shape is None else tuple(self._shape)
        assert self._count == math.prod(shape), f"{self._path}: {self._count} elements for {shape}"
        if self._shape is None:
            header = npy_header(self._dtype, shape)
            assert len(header) == len(self._header), "headers of one dimension have 128 bytes"
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            self._crc = file_crc32c(self._full)
        self._file.flush()
        sync_files([self._file.fileno()])
        self._file.close()
        return ArrayEntry(self._path, self._dtype, shape, self._crc)

    def discard(self) -> None:
        """Remove the file instead."""
        self._file.close()
        self._full.unlink()

    def _write(self, data: np.ndarray) -> None:
        self._crc = _core.crc32c_extend(self._crc, data)
        self._file.write(data.data)

    def close(self) -> None:
        self._file.close()


def write_array(
    root: Path, path: str, dtype: str, shape: Sequence[int] | None, pieces: Iterable[np.ndarray]
) -> ArrayEntry:
    """Write and sync an array of pieces; returns its entry for the manifest. See ArrayFile."""
    with ArrayFile(root, path, dtype, shape) as file:
        for values in pieces:
            file.append(values)
        return file.finish()


def check_space(needed: Iterable[tuple[Path, int]]) -> int:
    """Raise StorageError (ENOSPC) if a file system has too little space. Returns the bytes that are needed.

    needed: (directory, bytes to be written there).
    """
    totals: Counter[int] = Counter()
    directories: dict[int, Path] = {}
    for directory, size_bytes in needed:
        device = directory.stat().st_dev
        totals[device] += size_bytes
        directories.setdefault(device, directory)
    for device, directory in directories.items():
        disk = os.statvfs(directory)
        free = disk.f_bavail * disk.f_frsize
        if totals[device] > free:
            message = (
                f"not enough room, and nothing more was written: {format_bytes(totals[device])} needed, "
                f"{format_bytes(free)} free on the disk of"
            )
            raise StorageError(errno.ENOSPC, message, directory)
    return totals.total()
