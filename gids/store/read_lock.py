"""Readers lock a dataset (shared), so that restripe (exclusive) does not move it. Called by both.

The lock is an `flock` on a file that is never replaced. The system releases it when the process ends. On file
systems without locks there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from gids.errors import FormatError
from gids.stored_file import AnyFile, open_descriptor


def read_while_alive(owner: object, path: AnyFile) -> Callable[[], object]:
    """Lock `path` for reading until `owner` is garbage, or until the returned function is called.

    Raises FormatError while the dataset is being moved.
    """
    fd = open_descriptor(path)
    unlock = weakref.finalize(owner, os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FormatError(f"{_dataset_of(path)} is being restriped: open it when that is done") from None
    except OSError:
        pass  # no locks here
    return unlock


@contextlib.contextmanager
def without_readers(path: AnyFile | None) -> Iterator[None]:
    """Lock `path` against readers. Raises FormatError if there is a reader."""
    if path is None:
        yield
        return
    fd = open_descriptor(path)
    try:
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                gc.collect()  # an unused FeatureStore may not be collected yet
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(
                f"{_dataset_of(path)} is open in this or another process: close it there, and try again"
            ) from None
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(fd)


def _dataset_of(path: AnyFile) -> Path:
    return Path(path).parents[2]  # tables/NAME/checksum.bin
