"""Changing a dataset that is there: one writer at a time, and a manifest that is replaced in one step.

Called by the writers of heat and of tables, by restripe, and by publish. A reader sees the old manifest or
the new one, whole; so new files are synced before a manifest names them, and old ones removed after.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST
from gids.write.sync import sync_directory, write_synced

_NEW_MANIFEST = f"{MANIFEST}.new"


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Hold the dataset's directory against other writers; the end of the process releases it, too."""
    read_manifest(root)  # says better than open() what is missing
    with locked_directory(root):
        yield


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Lock the directory that is at `path` once the lock is there. Raises OSError."""
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(path)):  # else it was replaced meanwhile
                yield
                return
        finally:
            os.close(fd)


def replace_manifest(root: Path, data: bytes) -> None:
    """Write the manifest anew, durably. The caller is the only writer. Raises OSError."""
    new = root / _NEW_MANIFEST
    write_synced(new, data)
    sync_directory(root)  # the names of directories that were made beside it
    os.rename(new, root / MANIFEST)
    sync_directory(root)
