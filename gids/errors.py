"""The errors that gids raises besides Python's own. Called by every part; knows none of them."""

from __future__ import annotations

import os


class StorageError(OSError):
    """A read from a dataset's shard failed.

    Attributes: ``errno``, ``filename`` (the shard), ``offset`` (bytes into the shard, or None). The
    loader that raised it stays usable: the next minibatch is unaffected.
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
    """A dataset directory, or a source to convert, does not have the layout that it should have."""


class MissingError(KeyError):
    """A dataset has no table, node type, relation, label, split or heat of that name; the message lists those
    that it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoDeviceError(RuntimeError):
    """There is no CUDA device that can be used; the message says why, and what to do."""


class MemoryBudgetError(ValueError):
    """``memory_bytes`` does not hold what one minibatch needs; the message lists the sum."""
