"""Closing: a context manager that closes itself; and OwnLock, a lock that a forked child can take.

Used by what owns memory, files or threads: loaders, streams, engines, samplers, scratch files, GPU caches.
"""

from __future__ import annotations

import os
import threading
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


class OwnLock:
    """As threading.RLock. If another thread has it during a fork, it is free in the child, which has no such
    thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def acquire(self, *, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        """Called in a forked child, by the thread that forked, which keeps the lock if it has it."""
        if self.acquire(blocking=False):
            self.release()
        else:
            self._lock = threading.RLock()


def _renew_all() -> None:
    for lock in list(_locks):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
