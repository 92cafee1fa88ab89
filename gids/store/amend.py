"""Changing a dataset that is there: one writer at a time, and a manifest that is replaced in one step.

Called by the writers of heat and of tables, and by restripe. A reader sees the old manifest or the new one,
whole; so new files are synced before a manifest names them, and old ones removed after.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gids.store.files import read_manifest
from gids.store.manifest import MANIFEST
from gids.store.publish import sync_directory

_NEW_MANIFEST = f"{MANIFEST}.new"


@contextlib.contextmanager
def only_writer(root: Path) -> Iterator[None]:
    """Hold the dataset's directory against other writers; the end of the process releases it, too."""
    read_manifest(root)  # says better than open() what is missing
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def replace_manifest(root: Path, data: bytes) -> None:
    """Write the manifest anew, durably. The caller is the only writer. Raises OSError."""
    new = root / _NEW_MANIFEST
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, root / MANIFEST)
    sync_directory(root)
