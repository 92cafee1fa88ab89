"""Closing: a context manager that closes itself; OwnLock, a lock that a forked child can take; and Threads,
which work until the process ends.

Used by what owns memory, files or threads: loaders, streams, engines, samplers, scratch files, GPU caches.
"""

from __future__ import annotations

import _thread
import errno
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_Work = tuple[Future[Any], Callable[[], Any]]
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


class Threads(Executor):
    """As ThreadPoolExecutor, which refuses work once the main thread came to its end: an epoch of another
    thread goes on then.

    count: of the threads, which are started as they are needed.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ends, self._lock = False, OwnLock()
        # For who drops it. Not at exit: others close what uses it then.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Raises OSError if no thread can be started."""
        future: Future[R] = Future()
        with self._lock:
            if self._ends:
                raise RuntimeError(f"the threads {self._name} have ended")
            self._threads = [thread for thread in self._threads if thread.ident]  # those that did start
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
                self._threads.append(thread)  # first: Ctrl-C may interrupt start() once it works
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(
                        errno.EAGAIN,
                        f"cannot start the thread {self._name}: raise the limit on processes (ulimit -u, the "
                        f"container's pids limit) or on address space (ulimit -v): {error}",
                    ) from None
            self._queue.put((future, lambda: fn(*args, **kwargs)))
            if self._ends:  # a signal handler called shutdown() meanwhile: the threads may have ended
                future.cancel()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._ends = True
            while cancel_futures:
                try:
                    work = self._queue.get_nowait()
                except Empty:
                    break
                if work is not None:
                    work[0].cancel()
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                if thread.ident:
                    thread.join()


def _work(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        future, function = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        del work, future, function  # which may keep memory while this waits
    queue.put(None)  # for the other threads
