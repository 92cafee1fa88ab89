"""Who reads a dataset keeps it from being moved: a shared lock of readers, an exclusive one of restripe.

Called by FeatureStore and restripe. The lock is the system's (`flock`), on a file that a dataset keeps for
life: it ends with the process that holds it, and where the file system has no locks there is none.
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


def read_while_alive(owner: object, path: Path) -> Callable[[], object]:
    """Lock `path` for reading until `owner` is gone, or what is returned is called.

    Raises FormatError while its dataset is being moved.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    unlock = weakref.finalize(owner, os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FormatError(f"{_dataset_of(path)} is being restriped; open it when that is done") from None
    except OSError:
        pass  # no locks here
    return unlock


@contextlib.contextmanager
def without_readers(path: Path | None) -> Iterator[None]:
    """Lock `path` against readers. Raises FormatError when there is one."""
    if path is None:
        yield
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                gc.collect()  # a FeatureStore that nobody refers to any more may be garbage still
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FormatError(
                f"{_dataset_of(path)} is open in another process, or in this one: "
                "end what reads it, and try again"
            ) from None
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(fd)


def _dataset_of(path: Path) -> Path:
    return path.parents[2]  # tables/NAME/checksum.bin
