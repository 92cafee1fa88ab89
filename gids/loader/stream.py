"""The stream: takes sampled minibatches and returns them with their features.

Called by FeatureLoader.attach. It decides when each step enters, is planned, gathered and retired. It knows
nothing of pages, files or frameworks.

The order is fixed, so that a run can be replayed exactly: before minibatch t is planned, minibatch t - D is
retired and t + W has entered (W: the window, D: the planned minibatches). Only the first W steps differ: the
first minibatch is handed out when one is sampled; then each step enters two until the window is full.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from gids.closing import Closing
from gids.errors import StorageError
from gids.loader.observer import Observers
from gids.loader.stages import Stage, stage
from gids.packs import ByReference

T = TypeVar("T")
R = TypeVar("R")
Ids = Mapping[str, torch.Tensor]
Features = dict[str, torch.Tensor]
IdsOf = Callable[[T], Ids]

log = logging.getLogger("gids")


class Cache(Protocol):
    """The methods of a cache that a stream calls: gids.cache.FeatureCache, or the one on a CUDA device."""

    next_step: int

    def enter(self, step: int, ids: Ids) -> None: ...
    def plan(self, step: int) -> None: ...
    def ready(self, step: int) -> bool: ...
    def gather(self, step: int) -> tuple[Features, Exception | None]: ...
    def retire(self, step: int) -> None: ...
    def cancel(self) -> None: ...
    def read_through(self, ids: Ids) -> tuple[Features, Exception | None]: ...
    def stats(self) -> dict[str, dict[str, Any]]: ...
    def memory(self) -> dict[str, int]: ...
    def page_words(self, table: str) -> npt.NDArray[np.uint64]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Failed(ByReference):
    """In place of a minibatch that could not be sampled: its error."""

    error: Exception

    def raise_error(self) -> NoReturn:
        """Raise it, once. It refers to the frames that it passes, so nothing here refers to it any more."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error

    @staticmethod
    def or_else(function: Callable[[T], R], value: R) -> Callable[[T], R]:
        """A function that returns `value` for a minibatch that could not be sampled."""
        return lambda minibatch: value if isinstance(minibatch, Failed) else function(minibatch)


class WindowedStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}) that reads ahead through the cache.

    cache_for: called with every minibatch, its ids, and whether it is the first, to learn the sizes of
    minibatches. It returns the same cache each time. window_batches, planned_batches: called before each
    step; the first minibatch may change them. on_close: called once, when no step of this stream is live.
    stage: marks a stage for profilers. observers: called at each event.
    """

    def __init__(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        cache_for: Callable[[T, Ids, bool], Cache],
        *,
        window_batches: Callable[[], int],
        planned_batches: Callable[[], int],
        on_close: Callable[[], None],
        seconds: dict[str, float],
        stage: Stage = stage,
        observers: Observers | None = None,
    ) -> None:
        self._source = iter(minibatches)
        self._ids_of = ids_of
        self._cache_for = cache_for
        self._cache: Cache | None = None
        self._window_batches = window_batches
        self._most_window: int | None = None  # where the window must be shorter
        self._planned_batches = planned_batches
        self._seconds = seconds
        self._profile = stage
        self._observers = observers = observers or Observers(None)
        self._live: deque[int] = deque()  # steps that entered and did not retire
        self._held: deque[T] = deque()  # entered, not yet handed out
        self._first = self._entered = self._planned = self._gathered = 0  # steps, once there is a cache
        self._end: BaseException | None = None  # the error that ended the source
        self._closed = False
        self.reads_ahead = True
        """Whether minibatches after the one that is due are planned."""
        # The finalizer must not keep the stream itself alive.
        self._opened: list[Cache] = []
        self._finalizer = weakref.finalize(self, _close, self._opened, self._live, observers, on_close)

    def __next__(self) -> tuple[T, Features]:
        """The next minibatch. The stream goes on after a StorageError and ends with any other error."""
        if self._closed:
            raise StopIteration
        error: Exception | None = None
        try:
            self._fill()
            if self._gathered == self._planned:
                raise self._take_end()
            features, error = self._gather()
            minibatch = self._held.popleft()
            if error is not None:
                raise error
            return minibatch, features
        except BaseException as raised:
            if raised is not error or not isinstance(raised, StorageError):
                self.close()
            raise
        finally:
            error = None  # it refers to this frame, and so to this stream

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether nothing more will enter: at the end of the source, or after its error."""
        return self._end is not None

    @property
    def gathered(self) -> int:
        """Number of minibatches that were handed out, or failed."""
        return self._gathered - self._first

    @property
    def idle(self) -> bool:
        """Whether no read is going on."""
        return self._gathered == self._planned

    def ready(self) -> bool:
        """Whether next() would not wait for the disk. Plans the next minibatch."""
        try:
            self._fill()
        except BaseException:
            self.close()
            raise
        due = self._gathered
        return self._cache is None or due == self._planned or self._cache.ready(due)

    def take_back(self) -> list[T]:
        """Close, and return what was sampled and not handed out."""
        held = list(self._held)
        self.close()
        return held

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window from now on. Logs the reason, unless it is empty."""
        if batches < self._window:
            if reason:
                log.warning(
                    "window lowered from %d to %d minibatches: %s", self._window, max(0, batches), reason
                )
            self._most_window = max(0, batches)

    def close(self) -> None:
        """Let reads finish, remove every mark, drop what was sampled ahead. Idempotent."""
        self._closed = True
        self._held.clear()
        self._finalizer()
        self._opened.clear()
        self._cache = self._end = None

    @property
    def _window(self) -> int:
        window = self._window_batches()
        return window if self._most_window is None else min(window, self._most_window)

    def _fill(self) -> None:
        """Plan as far ahead as allowed, entering the window first."""
        if self._cache is None:
            self._enter_until(1)  # only then are the sizes of minibatches and the first step known
        warm = self._gathered - self._first + 1  # 1 for the first minibatch
        ahead = min(self._planned_batches(), warm) if self.reads_ahead else 1
        while self._planned < self._gathered + ahead:
            t = self._planned
            self._enter_until(t + 1 + min(self._window, t - self._first))
            if self._entered == t:
                return  # the source is exhausted
            assert self._cache is not None
            with self._profile("plan"), self._observers.stage("plan"):
                self._cache.plan(t)
                self._observers.planned(t)
            self._planned += 1

    def _enter_until(self, end: int) -> None:
        while self._entered < end and self._end is None:
            started = time.perf_counter()
            try:
                with self._profile("sample"), self._observers.stage("sample"):
                    minibatch = next(self._source)
                    try:
                        ids = self._ids_of(minibatch)
                    except StorageError as error:
                        minibatch, ids = cast(T, Failed(error.with_traceback(None))), {}
                self._seconds["sample"] += time.perf_counter() - started
                cache = self._cache_for(minibatch, ids, self._cache is None)
                if self._cache is None:
                    self._cache = cache
                    self._opened.append(cache)
                    self._first = self._entered = self._planned = self._gathered = cache.next_step
                with self._profile("enter"), self._observers.stage("enter"):
                    self._cache.enter(self._entered, ids)
                    self._live.append(self._entered)
                    self._observers.entered(self._entered, ids)
            except StopIteration:
                self._end = StopIteration()  # a fresh one: the caught one's frames would hold features
                return
            except Exception as error:  # raised when it is due: earlier minibatches are handed out first
                # without this frame, which refers to the stream: a stream that is dropped ends at once
                self._end = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                return
            self._held.append(minibatch)
            self._entered += 1

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None  # not kept: it refers to frames that refer to this stream
        return end or StopIteration()

    def _gather(self) -> tuple[Features, Exception | None]:
        assert self._cache is not None
        with self._profile("gather"), self._observers.stage("gather"):
            features, error = self._cache.gather(self._gathered)
            self._observers.gathered(self._gathered)
            self._cache.retire(self._gathered)
            self._observers.retired(self._live.popleft())
        self._gathered += 1
        return features, error


def _close(opened: list[Cache], live: deque[int], observers: Observers, on_close: Callable[[], None]) -> None:
    for cache in opened:
        cache.cancel()
    while live:
        observers.retired(live.popleft())
    on_close()


class ReadThroughStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """A second stream on a cache whose window is taken: no lookahead and no marks."""

    def __init__(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        cache_for: Callable[[T, Ids, bool], Cache],
    ) -> None:
        self._source = iter(minibatches)
        self._ids_of = ids_of
        self._cache_for = cache_for
        self.closed = False

    def __next__(self) -> tuple[T, Features]:
        if self.closed:
            raise StopIteration
        minibatch = next(self._source)
        ids = self._ids_of(minibatch)
        features, error = self._cache_for(minibatch, ids, False).read_through(ids)
        try:
            if error is not None:
                raise error
            return minibatch, features
        finally:
            del error  # it refers to this frame

    def limit_window(self, batches: int, reason: str) -> None:
        """There is no window to limit."""

    def close(self) -> None:
        self.closed = True
