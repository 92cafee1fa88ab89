"""EpochStream: one epoch of minibatches with their features, whoever reads the rows. All loaders return it.

It counts what is sampled and what is returned, so that no epoch ends early in silence; it raises the error of
a minibatch when that minibatch is due; and another thread may close it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NoReturn, Protocol, TypeVar, cast

from gids.closing import Closing
from gids.errors import StorageError
from gids.loader.stream import Failed, Features

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_END = object()


class Sampled(Iterator[T]):
    """Counts the minibatches of an epoch, and returns a Failed for each that could not be sampled.

    Calls ``next`` with a default, because an exception keeps the frames that it passed through, and workers
    of a framework stop only when the last reference to their iterator is dropped.

    goes_on: there are more minibatches after any error. Default: only after a StorageError.
    Attributes: count: of the minibatches so far; ended: whether there are no more.
    """

    def __init__(self, minibatches: Iterable[T], *, goes_on: bool = False) -> None:
        self._minibatches: Iterator[T] = iter(minibatches)
        self._goes_on = goes_on
        self._first: list[object] = []
        self._begun = False
        self.count = 0
        self.ended = False

    def peek(self) -> T | Failed | None:
        """The first minibatch, which next() returns too; None if there is none, or it was taken."""
        self.fails_first()
        first = self._first[0] if self._first else _END
        return None if first is _END else cast("T | Failed", first)

    def fails_first(self) -> bool:
        """Sample the first minibatch, if none is. Whether that failed; then raise_first() must follow."""
        if self._begun:
            return False
        if not self._first:
            self._first.append(self._sample())
        return isinstance(self._first[0], Failed)

    def raise_first(self) -> NoReturn:
        """Raise the error of the first minibatch. The next one is the first then."""
        self.count += 1
        cast(Failed, self._first.pop()).raise_error()

    def __next__(self) -> T:
        self._begun = True
        minibatch = self._first.pop() if self._first else self._sample()
        if minibatch is _END:
            self.ended = True
            self.close()
            raise StopIteration
        self.count += 1
        return cast(T, minibatch)

    def close(self) -> None:
        """Drop the source. Idempotent. Also called by the stream of rows at its end."""
        close = getattr(self._minibatches, "close", None)
        self._minibatches = iter(())
        self._first.clear()
        if close is not None:
            close()

    def _sample(self) -> object:
        try:
            return next(self._minibatches, _END)
        except Exception as error:
            if not self._goes_on and not isinstance(error, StorageError):
                self._minibatches = iter(())
            # without this frame, which refers to the iterator
            return Failed(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


class RowStream(Protocol[T_co]):
    """Reads the rows of minibatches. Attributes: closed: whether it ended, or an error ended it."""

    @property
    def closed(self) -> bool: ...
    def __next__(self) -> tuple[T_co, Features]: ...
    def limit_window(self, batches: int, reason: str) -> None: ...
    def close(self) -> None: ...


class NoRows(Generic[T]):
    """The stream of a loader without tables."""

    closed = False

    def __init__(self, minibatches: Iterator[T]) -> None:
        self._minibatches = minibatches

    def __next__(self) -> tuple[T, Features]:
        return next(self._minibatches), {}

    def limit_window(self, batches: int, reason: str) -> None:
        """There is no window."""

    def close(self) -> None:
        """Nothing is open."""


class EpochStream(Closing, Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}).

    It goes on after an error of the source, as far as the source does, and after a StorageError; any other
    error ends it. close() waits for a next() in another thread. After close() there are no more minibatches.

    rows: reads the minibatches of source. count: number of minibatches, if known. alone: other ranks need not
    hear of an error before it is raised. ended: called with the number of minibatches at their end.
    """

    def __init__(
        self,
        source: Sampled[T],
        rows: RowStream[T],
        *,
        count: int | None,
        alone: bool = True,
        ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._source, self._rows, self._count, self._alone = source, rows, count, alone
        self._ended = ended
        self._returned, self._failed = 0, False  # by an error that may end the source
        self._closed = self._cut_short = False
        self._lock = threading.RLock()

    @property
    def ahead(self) -> int:
        """Number of minibatches that were sampled and not returned."""
        return self._source.count - self._returned

    def __next__(self) -> tuple[T, Features]:
        with self._lock:
            if self._cut_short:
                self._cut_short = False
                most = "its" if self._count is None else self._count
                raise RuntimeError(
                    f"an error ended this epoch after {self._returned} of {most} minibatches: begin it "
                    "again, or resume it from the loader's state_dict()"
                )
            if self._closed:
                raise StopIteration
            # Memory is shared out by the first minibatch.
            try:
                if self._alone and self._source.fails_first():
                    self._source.raise_first()
                minibatch, features = next(self._rows)
            except StopIteration:
                lost = self._lost()
                self.close()
                if lost:
                    raise RuntimeError(lost) from None
                self._ended(self._returned)
                raise
            except BaseException as error:
                self._returned += 1
                self._failed = self._failed or not isinstance(error, StorageError)
                if self._rows.closed:
                    self.close()
                    self._cut_short = isinstance(error, StorageError)  # which concerns one minibatch
                raise
            self._returned += 1
            if isinstance(minibatch, Failed):
                self._failed = self._failed or not isinstance(minibatch.error, StorageError)
                minibatch.raise_error()
            return minibatch, features

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window from now on. Logs the reason once."""
        self._rows.limit_window(batches, reason)

    def close(self) -> None:
        """Let reads finish, drop what was sampled ahead. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._rows.close()
                self._source.close()

    def _lost(self) -> str:
        """What is missing at the end of the epoch."""
        if not self._source.ended or self.ahead:
            return f"gids returned {self._returned} of {self._source.count} minibatches; please report this"
        if self._count is not None and self._returned < self._count and not self._failed:
            return f"the epoch has {self._count} minibatches, and its source ended after {self._returned}"
        return ""
