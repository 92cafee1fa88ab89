"""Closing: a context manager that closes itself; and OwnLock, a lock that a forked child can take.

Used by what owns memory, files or threads: loaders, streams, engines, samplers, scratch files, GPU caches.
"""

from __future__ import annotations

import _thread
import os
import weakref
from typing import Self

_locks: weakref.WeakSet[OwnLock] = weakref.WeakSet()


class Closing:
    """Calls close(), which the subclass defines, at the end of a ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OwnLock(_thread.RLock):  # type: ignore[misc]  # final in mypy's stubs only
    """threading.RLock. If another thread has it during a fork, it is free in the child, which has no such
    thread. No Ctrl-C comes between taking it and the ``with`` block: its methods are native.

    Nor between taking it, if it is free, and noting that: ``taken += map(lock.acquire, [False])``.
    """

    def __init__(self) -> None:
        _locks.add(self)

    def _renew(self) -> None:
        """Called in a forked child, by the thread that forked, which keeps the lock if it has it."""
        if self.acquire(blocking=False):
            self.release()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
