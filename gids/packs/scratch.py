"""Scratch: unnamed files on a disk of choice, of bounded size. A killed process leaves nothing behind.

Used for packs and for spooled minibatches. Knows bytes only.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gids import _core
from gids.errors import StorageError

log = logging.getLogger("gids")

BLOCK = 4096
"""Offsets and lengths of direct I/O on scratch files are multiples of this."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_LONG_BYTES = 128 << 20
_SHARE = 2
"""Without scratch_bytes, files take at most half of the free space, divided by the ranks of the machine."""


class ScratchFull(StorageError):
    """The disk, or scratch_bytes, does not have room for a file of this size."""


class Spare(Protocol):
    """What has spare files: work that can be done again."""

    def close(self) -> None: ...


class Scratch:
    """A directory for scratch files. limit_bytes: of all files together.

    Attributes: spares: are closed where another file needs their room.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self.spares: weakref.WeakSet[Spare] = weakref.WeakSet()
        self._files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the files
        self._closing: list[threading.Thread] = []

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return sum(file.nbytes for file in self._files)

    def free_bytes(self, *, spare: bool = False) -> int:
        """What a file may still take: also what spare files have, unless it is spare itself."""
        with self._lock:
            return self.limit_bytes - sum(file.nbytes for file in self._files if spare or not file.spare)

    def reclaim(self) -> bool:
        """Close what has spare files. Returns whether there was something."""
        spares = list(self.spares)
        for spare in spares:
            self.spares.discard(spare)
            spare.close()
        return bool(spares)

    def wait_for_space(self) -> None:
        """Wait until all closed files have given their space back."""
        while self._closing:
            self._closing.pop().join()

    def give_back(self, fd: int, nbytes: int) -> None:
        """Free a file. In the background if it is long: a file system may take seconds to free its space."""
        if nbytes < _LONG_BYTES:
            _free(fd)
            return
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        closing = threading.Thread(target=_free, args=(fd,), name="gids-scratch", daemon=True)
        self._closing.append(closing)
        closing.start()

    def open(self, *, spare: bool = False) -> ScratchFile:
        """A new file. Raises StorageError if the directory takes none. spare: others may need its room."""
        file = ScratchFile(self, spare=spare)
        with self._lock:
            self._files.add(file)
        return file


class ScratchFile:
    """An unnamed file, for direct I/O where the file system has it. spare: may be set to False later."""

    def __init__(self, scratch: Scratch, *, spare: bool) -> None:
        self._scratch, self.spare = scratch, spare
        self.nbytes = 0
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        try:
            try:
                self.fd = os.open(scratch.directory, flags | os.O_DIRECT, 0o600)
                self.direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.fd = os.open(scratch.directory, flags, 0o600)
                self.direct = False
        except OSError as error:
            reason = "cannot make a scratch file: " + os.strerror(error.errno or 0)
            raise StorageError(error.errno or 0, reason, scratch.directory) from error
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._pid, self.fd)

    @property
    def path(self) -> str:
        """A path that opens this file again in this process."""
        return f"/proc/self/fd/{self.fd}"

    @property
    def directory(self) -> Path:
        return self._scratch.directory

    def reserve(self, nbytes: int) -> None:
        """Make the file at least this long, with its blocks. Raises ScratchFull.

        If there is no room, spare files are closed, unless this is one.
        """
        try:
            self._reserve(nbytes)
        except ScratchFull:
            if self.spare or not self._scratch.reclaim():
                raise
            self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> None:
        more = nbytes - self.nbytes
        if more <= 0:
            return
        if self._scratch.taken_bytes + more > self._scratch.limit_bytes:
            reason = f"scratch_bytes={self._scratch.limit_bytes} is used up"
            raise ScratchFull(errno.ENOSPC, reason, self.directory)
        try:
            self._allocate(more)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageError(error.errno or 0, os.strerror(error.errno or 0), self.directory) from error
            reason = f"no room for {nbytes} bytes of scratch"
            raise ScratchFull(error.errno, reason, self.directory) from error
        self.nbytes = nbytes

    def close(self) -> None:
        """Give the space back, soon. Idempotent."""
        if os.getpid() != self._pid:
            self._finalizer()
        elif self._finalizer.detach() is not None:
            self._scratch.give_back(self.fd, self.nbytes)
        self.nbytes = 0

    def _allocate(self, more: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.nbytes, more)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._scratch.wait_for_space()
            os.posix_fallocate(self.fd, self.nbytes, more)


def _free(fd: int) -> None:
    """Close a file. It is cut first: a child process that was forked meanwhile has it open, too."""
    os.ftruncate(fd, 0)
    os.close(fd)


def _end(pid: int, fd: int) -> None:
    if os.getpid() == pid:
        _free(fd)
    else:  # a forked child frees nothing
        os.close(fd)


def find_scratch(
    chosen: str | os.PathLike[str] | None,
    limit_bytes: int | None,
    near: Sequence[Path],
    *,
    warn: bool = False,
    ranks: int = 1,
) -> Scratch | None:
    """The directory for scratch files; None if there is none, which is logged.

    chosen: the user's directory; then a wrong one is an error. near: files of the dataset; without `chosen`
    the first of their directories that takes files on a disk is used. warn: log a warning, not only an
    information, if there is none. ranks: processes of this machine that share the free space, if limit_bytes
    is None.
    Raises StorageError if the given directory takes no files, ValueError if it is not on a disk.
    """
    if chosen is not None:
        directory = Path(chosen)
        if not directory.is_dir():
            raise StorageError(errno.ENOTDIR, "scratch= must be a directory", directory)
        _try(directory)
        return Scratch(directory, _limit(directory, limit_bytes, ranks))
    reason = "the dataset is on no local disk"
    for directory in dict.fromkeys(path.resolve().parent for path in near):
        try:
            _try(directory)
            return Scratch(directory, _limit(directory, limit_bytes, ranks))
        except (StorageError, ValueError) as error:
            reason = str(error)
    log.log(
        logging.WARNING if warn else logging.INFO,
        "no scratch files, so no packs: %s; give scratch=DIRECTORY to gids.open()",
        reason,
    )
    return None


def _try(directory: Path) -> None:
    file = Scratch(directory, 0).open()
    try:
        file_system, _ = _core.probe_file(file.path, direct=False)
    finally:
        file.close()
    if file_system in _IN_MEMORY:
        raise ValueError(f"{directory} is on {file_system}, which is memory: scratch= must be on a disk")


def _limit(directory: Path, limit_bytes: int | None, ranks: int) -> int:
    file_system = os.statvfs(directory)
    free = file_system.f_bavail * file_system.f_frsize
    return free // (_SHARE * ranks) if limit_bytes is None else limit_bytes
