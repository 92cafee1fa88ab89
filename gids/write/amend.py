"""Changes an existing dataset: one writer at a time, and the manifest is replaced in one step.

Called by the writers of heat and tables, by restripe and by Workplace. A reader sees the old manifest or the
new one. So new files are synced before the manifest names them, and old files are removed after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gids.errors import StorageError
from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST
from gids.write.files import sync_directory, write_synced

_NEW_MANIFEST = f"{MANIFEST}.new"


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Lock the dataset against other writers. The end of the process also releases the lock."""
    read_manifest(root)  # its errors are clearer than open()'s
    with locked_directory(root):
        yield


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Lock the directory at `path`, waiting for other holders. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(path)):  # else it was replaced while we waited
                yield
                return
        finally:
            os.close(fd)


def locking_process(path: Path) -> int | None:
    """The process of this machine that has a lock of a file, or None if none is known."""
    try:
        inode = os.stat(path).st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # "1: FLOCK ADVISORY WRITE 4711 00:1f:INODE 0 EOF"; who waits has "->" before FLOCK
        fields = line.split()
        if len(fields) > 5 and fields[1] != "->" and fields[5].endswith(f":{inode}"):
            pid = int(fields[4])
            return pid if pid > 0 and os.path.exists(f"/proc/{pid}") else None
    return None


def is_open_at(fd: int, path: Path) -> bool:
    """Whether a path still leads to this open file or directory."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def replace_manifest(root: Path, data: bytes) -> None:
    """Replace the manifest, durably. The caller holds only_writer. Raises OSError."""
    new = root / _NEW_MANIFEST
    write_synced(new, data)
    sync_directory(root)  # the names of new directories beside it
    os.rename(new, root / MANIFEST)
    sync_directory(root)


@contextlib.contextmanager
def unchanged_on_error(root: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a StorageError which says that `what` failed and the dataset is unchanged."""
    try:
        yield
    except (StorageError, FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        message = f"{what} failed ({error.strerror}); the dataset is unchanged"
        raise StorageError(error.errno or 0, message, root) from error
