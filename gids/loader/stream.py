"""EpochStream: one epoch of minibatches with their features. The only loop over minibatches; all loaders
return it.

It samples ahead, tells the cache what enters, and hands out what it gathers. An error is raised when its
minibatch is due, and ends the epoch. The stream is new until its first minibatch, then open, then closed.

The order is fixed, so that a run can be replayed exactly: before minibatch t is planned, minibatch t - D is
gathered and t + W has entered (W: the window, D: the planned minibatches, on which no hit depends). Only the
first W steps differ: the first minibatch is handed out when one is sampled; then each step enters two until
the window is full.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from gids.closing import Closing
from gids.loader.queue import Queue
from gids.loader.rows import Features, Rows
from gids.profiling import stage

T = TypeVar("T")
log = logging.getLogger("gids")

NO_MEMORY = (
    "the system gives this process no more memory: raise the limit on its address space (ulimit -v), or give "
    "gids.open() a smaller memory= and threads="
)


class State(Enum):
    """NEW to OPEN: the first minibatch. To CLOSED: close(), the last minibatch, or an error."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class EpochStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}).

    It closes itself with the last minibatch: nobody has to ask for one more. After close() it has no more
    minibatches; after an error, or Ctrl-C, in next(), it raises RuntimeError. One thread uses it.

    rows: reads what minibatches need. pid: of the process that opened the source; another one is a forked
    child. check: called before each minibatch; raises where none can be taken. seconds: gets what sampling
    takes, as "sample".
    """

    def __init__(
        self,
        queue: Queue[T],
        rows: Rows,
        *,
        pid: int | None = None,
        check: Callable[[], None] | None = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        self._queue, self._rows, self._check = queue, rows, check
        self._pid = os.getpid() if pid is None else pid
        self._seconds = {"sample": 0.0} if seconds is None else seconds
        self._state = State.NEW
        self._planned = 0  # minibatches
        self._most_window: float = math.inf  # where the window must be shorter
        self._ended_by = ""  # an error that ended the epoch

    @property
    def ahead(self) -> int:
        """Number of minibatches that were sampled and not returned."""
        return len(self._queue.held)

    def __next__(self) -> tuple[T, Features]:
        if self._state is State.CLOSED:
            if self._ended_by:
                raise RuntimeError(self._ended_by)
            raise StopIteration
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this source was opened before a fork: a forked child opens its own source, by gids.open()"
            )
        if self._check is not None:
            self._check()
        try:
            if self._state is State.NEW:
                self._rows.begin()
                self._state = State.OPEN
            taken = self._take()
            self._close_at_end()
        except StopIteration:
            self.close()
            raise
        except BaseException as error:
            self.fail(error)
            raise
        return taken

    def fail(self, error: BaseException) -> None:
        """Close, because of this error or interruption. next() says so from now on."""
        if isinstance(error, MemoryError):
            error.add_note(NO_MEMORY)
        queue = self._queue
        what = "an error" if isinstance(error, Exception) else "Ctrl-C"
        most = "its" if queue.count is None else queue.count
        self._ended_by = (
            f"{what} ended this epoch after {queue.taken} of {most} minibatches: begin it again, or resume "
            "it from the loader's state_dict()"
        )
        self.close()

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window from now on; 0: hold the minibatch that is due only. Logs the reason."""
        if batches < self._window:
            log.warning("window lowered from %d to %d minibatches: %s", self._window, max(0, batches), reason)
            self._most_window = max(0, batches)

    def close(self) -> None:
        """Let reads finish, drop what was sampled ahead. Idempotent."""
        self._state = State.CLOSED
        self._rows.close()
        self._rows = Rows()
        self._queue.close()

    def __del__(self) -> None:
        self.close()

    def _take(self) -> tuple[T, Features]:
        """The minibatch that is due, and its features. Raises its error, or StopIteration."""
        self._fill()
        queue = self._queue
        if self._planned == queue.taken:
            raise queue.take_end()
        with stage("gather"):
            features = self._rows.gather(queue.taken, queue.held[0])
        return queue.take(), features

    @property
    def _window(self) -> int:
        return int(min(self._rows.window, self._most_window))

    def _fill(self) -> None:
        """Plan as far ahead as allowed, entering the window first."""
        if not self._queue.sampled:
            self._enter(0)  # only then are the sizes of minibatches known
        warm = self._queue.taken + 1  # 1 for the first minibatch
        ahead = min(self._rows.planned, warm) if self._most_window else 1
        while self._planned < self._queue.taken + ahead:
            t = self._planned
            self._enter(t)
            if self._queue.sampled == t:
                return  # the epoch has no more
            with stage("plan"):
                self._rows.plan(t)
            self._planned += 1

    def _enter(self, t: int) -> None:
        """Enter the window of minibatch t. It may become shorter meanwhile."""
        queue, rows = self._queue, self._rows
        while queue.end is None and queue.sampled < t + 1 + min(self._window, t):
            try:
                begun = time.perf_counter()
                with stage("sample"):
                    minibatch = queue.sample()
                    ids = rows.ids(minibatch)
                self._seconds["sample"] += time.perf_counter() - begun
                with stage("enter"):
                    rows.enter(queue.sampled, minibatch, ids)
            except Exception as error:  # raised when it is due: earlier minibatches are handed out first
                queue.end_with(error)
                return
            queue.held.append(minibatch)

    def _close_at_end(self) -> None:
        """Close, if the last minibatch was taken."""
        if self._queue.taken == self._queue.count and self._queue.end is None:
            self._fill()  # the source may have more
        if self._queue.empty:
            self.close()
