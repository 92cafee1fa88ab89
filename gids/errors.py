"""The errors that gids raises besides the builtin ones. Used by every part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class StorageError(OSError):
    """A read from a shard, or a write, failed.

    Attributes: ``errno``; ``filename``; ``offset`` (in bytes, or None). A loader that raises it stays usable:
    the next minibatch is not affected.
    """

    def __init__(
        self, errno: int, message: str, path: str | os.PathLike[str], offset: int | None = None
    ) -> None:
        where = f"{os.fspath(path)}" + (f" at byte {offset}" if offset is not None else "")
        super().__init__(errno, f"{message}: {where}")
        self.filename = os.fspath(path)
        self.offset = offset

    def __str__(self) -> str:
        return f"[Errno {self.errno}] {self.strerror}"


class FormatError(ValueError):
    """A dataset, or a source to convert, does not have the expected layout."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put what a FormatError is about before its message."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None


class MissingError(KeyError):
    """A dataset has no table, node type, relation, label, split or heat with this name. The message lists the
    names that exist."""

    def __str__(self) -> str:
        return str(self.args[0])


class RankError(RuntimeError):
    """Another rank ended, does not answer, or failed. The message names it. Raised on every rank that waits
    for it."""


class NoDeviceError(RuntimeError):
    """No CUDA device is usable. The message gives the reason and what to do."""


class MemoryBudgetError(ValueError):
    """The memory is too small for one minibatch. The message lists what is needed."""
