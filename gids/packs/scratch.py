"""Scratch: unnamed files on disks of choice, of bounded size. A killed process leaves nothing behind.

Used for packs and for spooled minibatches. Each file is striped over all directories. Knows bytes only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gids import _core
from gids.closing import OwnLock
from gids.errors import StorageError
from gids.io.disks import device_of, disk_count

log = logging.getLogger("gids")

BLOCK = 4096
"""Offsets and lengths of direct I/O on scratch files are multiples of this."""

_STRIPE = _core.SCRATCH_STRIPE_BYTES
_IN_MEMORY = {"tmpfs", "ramfs"}
_LONG_BYTES = 128 << 20
_REUSED = 2
"""A file is reused where it is at most this many times as long as needed."""
_SHARE = 2
"""Without scratch_bytes, files take at most half of the free space, divided by the ranks of the machine."""


class ScratchFull(StorageError):
    """The disk, or scratch_bytes, does not have room for a file of this size."""


class Spare(Protocol):
    """What has spare files: work that can be done again."""

    def close(self) -> None: ...


class Scratch:
    """Directories for scratch files, whose disks work at the same time. limit_bytes: of all files together.

    Attributes: spares: are closed where another file needs their room.
    """

    def __init__(self, directories: Sequence[Path], limit_bytes: int) -> None:
        self.directories, self.limit_bytes = tuple(directories), limit_bytes
        self.spares: weakref.WeakSet[Spare] = weakref.WeakSet()
        self._files: weakref.WeakSet[ScratchFile] = weakref.WeakSet()
        self._kept: ScratchFile | None = None  # a long one that was closed
        self._lock = OwnLock()  # of the files; the garbage collector may close one meanwhile
        self._closing: list[threading.Thread] = []

    def __str__(self) -> str:
        return ", ".join(map(str, self.directories))

    @cached_property
    def disks(self) -> int:
        """Number of disks that hold the directories."""
        return disk_count(self.directories)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all files, without the one that is kept for reuse."""
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
        """Wait until all closed files, and the one that is kept, have given their space back."""
        self.keep(None)
        with self._lock:
            closing = self._closing
        for thread in closing:
            thread.join()

    def lengthen(self, file: ScratchFile, nbytes: int) -> None:
        """Count a file as so long from now on. Raises ScratchFull above the limit.

        Frees the file that is kept if this one needs its bytes.
        """
        with self._lock:
            taken = sum(other.nbytes for other in self._files if other is not file)
            room = self.limit_bytes - taken - nbytes
            if room < 0:
                raise ScratchFull(errno.ENOSPC, f"scratch_bytes={self.limit_bytes} is used up", str(self))
            file.nbytes, kept = nbytes, self._kept
            if kept is None or kept.nbytes <= room:
                return
            self._kept = None  # no other thread takes it
        self.give_back(kept)
        self.wait_for_space()

    def keep(self, file: ScratchFile | None) -> None:
        """Keep a closed file for open(): this one, or a longer one that is kept. None: keep no file."""
        with self._lock:
            kept = self._kept
            if file is not None and kept is not None and kept.nbytes > file.nbytes:
                kept, file = file, kept
            self._kept = file
        if kept is not None:
            self.give_back(kept)

    def give_back(self, file: ScratchFile) -> None:
        """Free a closed file. In the background if it is long: a file system may take seconds for that."""
        if file.nbytes < _LONG_BYTES:
            file.free()
            return
        closing = threading.Thread(target=file.free, name="gids-scratch", daemon=True)
        closing.start()
        with self._lock:
            self._closing = [*(thread for thread in self._closing if thread.is_alive()), closing]

    def open(self, nbytes: int = 0, *, spare: bool = False) -> ScratchFile:
        """A file for so many bytes, which are not reserved. spare: others may need its room.

        It may be the one that is kept, whose blocks are written faster than new ones: an epoch of 4 M rows of
        512 B takes 12 % less. Raises StorageError if a directory takes no file.
        """
        with self._lock:
            if self._kept is not None and self._kept.nbytes <= _REUSED * nbytes:
                file, self._kept = self._kept.taken_over(spare=spare), None
                if file is not None:
                    self._files.add(file)
                    return file
        file = ScratchFile(self, spare=spare)
        with self._lock:
            self._files.add(file)
        return file


class ScratchFile:
    """An unnamed file, in stripes over an unnamed file in each directory. spare: may be set to False later.

    Attributes: fds: of these files, for direct I/O where the file system has it. direct: whether all are.
    """

    def __init__(self, scratch: Scratch, *, spare: bool, before: ScratchFile | None = None) -> None:
        self._scratch, self.spare, self.directories = scratch, spare, scratch.directories
        self.nbytes: int = 0 if before is None else before.nbytes
        self.fds: list[int] = [] if before is None else before.fds
        self.direct: bool = before is None or before.direct
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._pid, self.fds)
        for directory in self.directories[len(self.fds) :]:
            self._open(directory)

    def _open(self, directory: Path) -> None:
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        try:
            try:
                # Thus no Ctrl-C comes between opening it and noting that.
                self.fds += map(os.open, [directory], [flags | os.O_DIRECT], [0o600])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.fds += map(os.open, [directory], [flags], [0o600])
                self.direct = False
        except OSError as error:
            reason = "cannot make a scratch file: " + os.strerror(error.errno or 0)
            raise StorageError(error.errno or 0, reason, directory) from error

    @property
    def paths(self) -> list[str]:
        """Paths that open the files of `fds` again in this process."""
        return [f"/proc/self/fd/{fd}" for fd in self.fds]

    def stripes(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(number of the file, offset there, bytes) of each piece. As in native/packs/stripes.h."""
        count, end = len(self.fds), offset + nbytes
        while offset < end:
            stripe, begin = divmod(offset, _STRIPE)
            piece = end - offset if count == 1 else min(end - offset, _STRIPE - begin)
            yield stripe % count, stripe // count * _STRIPE + begin, piece
            offset += piece

    def directory_of(self, offset: int) -> Path:
        """The directory that has this byte."""
        return self.directories[offset // _STRIPE % len(self.fds)]

    def reserve(self, nbytes: int) -> None:
        """Make the file at least this long, with its blocks where the file system reserves them. Raises
        ScratchFull.

        If there is no room, spare files are closed, unless this is one.
        """
        try:
            self._reserve(nbytes)
        except ScratchFull:
            if self.spare or not self._scratch.reclaim():
                raise
            self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> None:
        before = self.nbytes
        if nbytes <= before:
            return
        self._scratch.lengthen(self, nbytes)
        for number, (fd, directory) in enumerate(zip(self.fds, self.directories, strict=True)):
            begin, end = self._length(number, before), self._length(number, nbytes)
            try:
                self._allocate(fd, begin, end - begin)
            except OSError as error:
                self.nbytes = before
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StorageError(error.errno or 0, os.strerror(error.errno or 0), directory) from error
                reason = f"no room for {end} bytes of scratch"
                raise ScratchFull(error.errno, reason, directory) from error

    def _length(self, number: int, nbytes: int) -> int:
        """Of the file of this number, if there are so many bytes in all."""
        rounds, rest = divmod(nbytes, _STRIPE * len(self.fds))
        return rounds * _STRIPE + min(_STRIPE, max(0, rest - number * _STRIPE))

    def close(self, *, keep: bool = False) -> None:
        """Give the space back, soon; or, if the file is long, keep it for another one. Idempotent."""
        closed = self.taken_over(spare=True)
        if closed is not None and keep and self.nbytes >= _LONG_BYTES:
            self._scratch.keep(closed)
        elif closed is not None:
            self._scratch.give_back(closed)
        self.nbytes = 0

    def taken_over(self, *, spare: bool) -> ScratchFile | None:
        """Another one of the same fds. None if this one is closed, or another process's, which closes it."""
        if os.getpid() != self._pid:
            self._finalizer()
            return None
        if self._finalizer.detach() is None:
            return None
        return ScratchFile(self._scratch, spare=spare, before=self)

    def free(self) -> None:
        """Give the space back now."""
        self._finalizer()

    def _allocate(self, fd: int, begin: int, more: int) -> None:
        if not more:
            return
        try:
            os.posix_fallocate(fd, begin, more)
        except OSError as error:
            if error.errno == errno.EINVAL and self.direct:
                # ext2 and ext3 reserve no blocks: the C library writes to each, but not directly.
                return os.ftruncate(fd, begin + more)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._scratch.wait_for_space()
            os.posix_fallocate(fd, begin, more)


def _free(fds: Sequence[int]) -> None:
    """Close files. They are cut first: a child process that was forked meanwhile has them open, too."""
    closing = map(os.close, fds)
    try:
        for fd in fds:
            with contextlib.suppress(OSError):  # Btrfs needs space to cut a file
                os.ftruncate(fd, 0)
    finally:
        list(closing)  # also after Ctrl-C


def _end(pid: int, fds: Sequence[int]) -> None:
    if os.getpid() == pid:
        _free(fds)
    else:  # a forked child frees nothing
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
