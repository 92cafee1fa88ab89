"""One pass over minibatches that another framework samples, perhaps in worker processes.

Called by the adapters of DGL and GraphBolt, which put the features where their users expect them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

import torch

from gids.loader.feature_loader import FeatureLoader
from gids.loader.headroom import Headroom
from gids.loader.stream import Features, Ids

T = TypeVar("T")
_END = object()


class FrameworkEpoch(Generic[T], Iterator[tuple[T, Features]]):
    """(minibatch, {table: features}) of each minibatch. After an error in one the next can be asked for.

    ids_of: the rows of each table that a minibatch reads, wherever they were sampled. bytes_of: what a
    minibatch takes in memory. in_workers: minibatches come from worker processes; where this one cannot hold
    a window of them, the window is lowered, and a warning says so.
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

        def ids_on_cpu(minibatch: T) -> dict[str, torch.Tensor]:
            return {table: ids.cpu() for table, ids in ids_of(minibatch).items()}

        on_cpu = feature_loader.device.type == "cpu"
        self._stream = feature_loader.attach(
            self._source, ids_on_cpu if on_cpu else ids_of, bytes_of=bytes_of
        )

    def __next__(self) -> tuple[T, Features]:
        self._handed_out += 1
        minibatch, features = next(self._stream)
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._source.count - self._handed_out)
            if limit is not None:
                self._stream.limit_window(*limit)
        return minibatch, features

    def close(self) -> None:
        """End the pass: reads finish, workers stop. Idempotent; the end, and dropping it, do the same."""
        self._stream.close()


class _Counted(Iterator[T]):
    """Counts what was sampled.

    Workers stop when the last reference to their iterator goes, and an exception keeps the frames that it
    passed through: hence ``next`` with a default.
    """

    def __init__(self, minibatches: Iterator[T]) -> None:
        self._minibatches = minibatches
        self.count = 0

    def __next__(self) -> T:
        minibatch = next(self._minibatches, _END)
        if minibatch is _END:
            self.close()
            raise StopIteration
        self.count += 1
        return cast(T, minibatch)

    def close(self) -> None:
        """Called by the stream, too, when it ends."""
        self._minibatches = iter(())
