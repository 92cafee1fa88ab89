"""Scratch: unnamed files on disks of choice, of bounded size. A killed process leaves nothing behind.

Used for the annex and for spooled minibatches. Each file is striped over all directories. Knows bytes only.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gids import _core
from gids.errors import StorageError
from gids.io.disks import device_of, disk_count

log = logging.getLogger("gids")

BLOCK = 4096
"""Offsets and lengths of direct I/O on scratch files are multiples of this."""

_STRIPE = _core.SCRATCH_STRIPE_BYTES
_LONG_BYTES = 128 << 20
_IN_MEMORY = {"tmpfs", "ramfs"}
_SHARE = 2
"""Without scratch_bytes, files take at most half of the free space, divided by the ranks of the machine."""


class ScratchFull(StorageError):
    """The disk, or scratch_bytes, does not have room for a file of this size."""


class Scratch:
    """Directories for scratch files, whose disks work at the same time. limit_bytes: of all files."""

    def __init__(self, directories: Sequence[Path], limit_bytes: int) -> None:
        self.directories, self.limit_bytes = tuple(directories), limit_bytes
        self._files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()

    def __str__(self) -> str:
        return ", ".join(map(str, self.directories))

    @property
    def disks(self) -> int:
        """Number of disks that hold the directories."""
        return disk_count(self.directories)

    @property
    def free_bytes(self) -> int:
        """What files may still take."""
        return self.limit_bytes - sum(file.nbytes for file in self._files)

    def open(self, *, striped: bool = True) -> ScratchFile:
        """An empty file, in all directories or in the first one. Raises StorageError if one takes no file."""
        file = ScratchFile(self, self.directories if striped else self.directories[:1])
        self._files.add(file)
        return file


class ScratchFile:
    """An unnamed file, in stripes over an unnamed file in each of some directories.

    Attributes: nbytes: that are reserved. fds: of these files, for direct I/O where the file system has it.
    direct: whether all are.
    """

    def __init__(self, scratch: Scratch, directories: Sequence[Path]) -> None:
        self._scratch, self.directories = scratch, directories
        self.nbytes, self.fds, self.direct = 0, list[int](), True
        self._finalizer = weakref.finalize(self, _close, self.fds)
        for directory in self.directories:
            self._open(directory)

    def _open(self, directory: Path) -> None:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        try:
            try:
                self.fds.append(os.open(directory, flags | os.O_DIRECT, 0o600))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.fds.append(os.open(directory, flags, 0o600))
                self.direct = False
        except OSError as error:
            reason = "cannot make a scratch file: " + os.strerror(error.errno or 0)
            raise StorageError(error.errno or 0, reason, directory) from error

    @property
    def paths(self) -> list[str]:
        """Paths that open the files of `fds` again in this process."""
        return [f"/proc/self/fd/{fd}" for fd in self.fds]

    def reserve(self, nbytes: int) -> None:
        """Make the file at least this long, with its blocks where the file system reserves them. Raises
        ScratchFull, StorageError."""
        before = self.nbytes
        if nbytes <= before:
            return
        if nbytes - before > self._scratch.free_bytes:
            limit = self._scratch.limit_bytes
            raise ScratchFull(errno.ENOSPC, f"scratch_bytes={limit} is used up", str(self._scratch))
        for number, (fd, directory) in enumerate(zip(self.fds, self.directories, strict=True)):
            begin, end = self._length(number, before), self._length(number, nbytes)
            try:
                self._allocate(fd, begin, end - begin)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StorageError(error.errno or 0, os.strerror(error.errno or 0), directory) from error
                reason = f"no room for {end} bytes of scratch"
                raise ScratchFull(error.errno, reason, directory) from error
        self.nbytes = nbytes

    def _length(self, number: int, nbytes: int) -> int:
        """Of the file of this number, if there are so many bytes in all."""
        rounds, rest = divmod(nbytes, _STRIPE * len(self.fds))
        return rounds * _STRIPE + min(_STRIPE, max(0, rest - number * _STRIPE))

    def close(self) -> None:
        """Give the space back. Idempotent."""
        self._finalizer()
        self.nbytes = 0

    def _allocate(self, fd: int, begin: int, more: int) -> None:
        if not more:
            return
        try:
            os.posix_fallocate(fd, begin, more)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            # ext2 and ext3 reserve no blocks: the C library writes to each, but not directly.
            os.ftruncate(fd, begin + more)


def _close(fds: Sequence[int]) -> None:
    """In the background if the file is long: a file system may take seconds to give gigabytes back."""
    if sum(os.fstat(fd).st_size for fd in fds) < _LONG_BYTES:
        _close_now(fds)
    else:
        threading.Thread(target=_close_now, args=(fds,), name="gids-scratch", daemon=True).start()


def _close_now(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def find_scratch(
    chosen: Sequence[str] | None,
    limit_bytes: int | None,
    near: Sequence[Path],
    *,
    warn: bool = False,
    ranks: int = 1,
) -> Scratch | None:
    """The directories for scratch files; None if there is none, which is logged.

    chosen: the user's directories; then a wrong one is an error. near: files of the dataset; without `chosen`
    the first of their directories that takes files on a disk is used. warn: log a warning, not only an
    information, if there is none. ranks: processes of this machine that share the free space, if limit_bytes
    is None.
    Raises StorageError if a given directory takes no files, ValueError if it is not on a disk.
    """
    if chosen is not None:
        directories = [Path(name) for name in chosen]
        for directory in directories:
            if not directory.is_dir():
                raise StorageError(errno.ENOTDIR, "scratch= must be a directory", directory)
            _try(directory)
        return Scratch(directories, _limit(directories, limit_bytes, ranks))
    reason = "the dataset is on no local disk"
    for directory in dict.fromkeys(path.resolve().parent for path in near):
        try:
            _try(directory)
            return Scratch([directory], _limit([directory], limit_bytes, ranks))
        except (StorageError, ValueError) as error:
            reason = str(error)
    log.log(
        logging.WARNING if warn else logging.INFO,
        "no scratch files, so no packs: %s; give scratch=DIRECTORY to gids.open()",
        reason,
    )
    return None


def _try(directory: Path) -> None:
    file = Scratch([directory], 0).open()
    try:
        file_system, _ = _core.probe_file(file.paths[0], direct=False)
    finally:
        file.close()
    if file_system in _IN_MEMORY:
        raise ValueError(f"{directory} is on {file_system}, which is memory: scratch= must be on a disk")


def _limit(directories: Sequence[Path], limit_bytes: int | None, ranks: int) -> int:
    """Each directory gets as many bytes, so the fullest file system counts."""
    if limit_bytes is not None:
        return limit_bytes
    sharing = Counter(map(device_of, directories))
    each = []
    for directory in directories:
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        each.append(free // (_SHARE * ranks * sharing[device_of(directory)]))
    return len(directories) * min(each)
