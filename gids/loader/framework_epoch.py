"""One epoch of minibatches that another framework samples, here or in worker processes.

Called by the adapters of DGL and GraphBolt, which put the features into their minibatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from gids.loader.feature_loader import FeatureLoader
from gids.loader.headroom import Headroom
from gids.loader.stream import Features, Ids

T = TypeVar("T")
_END = object()


@dataclass(frozen=True, slots=True)
class _Failed:
    """The error of a minibatch that could not be sampled, until that minibatch is due."""

    error: Exception


class FrameworkEpoch(Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}). After an error it continues with the next minibatch.

    If sampling a minibatch fails, the error is raised when that minibatch is due.

    ids_of: returns the rows of each table that a minibatch reads, on any device. bytes_of: returns the memory
    of a minibatch. in_workers: minibatches come from worker processes. If this process cannot hold a window
    of them, the window is lowered and a warning is logged.
    """

    def __init__(
        self,
        feature_loader: FeatureLoader,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        *,
        bytes_of: Callable[[T], int],
        in_workers: bool,
    ) -> None:
        self._source = _Counted(minibatches)
        self._headroom = Headroom() if in_workers else None
        self._handed_out = 0

        on_cpu = feature_loader.device.type == "cpu"

        def ids_there(minibatch: T | _Failed) -> Ids:
            if isinstance(minibatch, _Failed):
                return {}
            ids = ids_of(minibatch)
            return {table: of_table.cpu() for table, of_table in ids.items()} if on_cpu else ids

        self._stream = feature_loader.attach(
            self._source, ids_there, bytes_of=lambda m: 0 if isinstance(m, _Failed) else bytes_of(m)
        )

    def __next__(self) -> tuple[T, Features]:
        self._source.sample_first()
        self._handed_out += 1
        minibatch, features = next(self._stream)
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._source.count - self._handed_out)
            if limit is not None:
                self._stream.limit_window(*limit)
        if isinstance(minibatch, _Failed):
            raise minibatch.error
        return minibatch, features

    def close(self) -> None:
        """End the epoch: reads finish, workers stop. Idempotent. Its end, and dropping it, do the same."""
        self._stream.close()
        self._source.close()


class _Counted(Iterator[T | _Failed]):
    """Counts the sampled minibatches, and returns a _Failed for each that could not be sampled.

    Uses ``next`` with a default, because an exception keeps the frames that it passed through, and workers
    stop only when the last reference to their iterator is dropped.
    """

    def __init__(self, minibatches: Iterator[T]) -> None:
        self._minibatches = minibatches
        self._first: list[T | object] = []
        self.count = 0

    def sample_first(self) -> None:
        """Sample the first minibatch; memory is shared out by its size. Raises the sampler's errors."""
        if not self.count and not self._first:
            self._first.append(next(self._minibatches, _END))

    def __next__(self) -> T | _Failed:
        try:
            minibatch = self._first.pop() if self._first else next(self._minibatches, _END)
        except Exception as error:
            self.count += 1
            # without this frame, which refers to the iterator
            return _Failed(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        if minibatch is _END:
            self.close()
            raise StopIteration
        self.count += 1
        return cast(T, minibatch)

    def close(self) -> None:
        """Also called by the stream at its end."""
        self._minibatches = iter(())
        self._first.clear()
