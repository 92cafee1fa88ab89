"""One epoch of minibatches that another framework samples, here or in worker processes.

Called by the adapters of DGL and GraphBolt, which put the features into their minibatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gids.cuda import on_host
from gids.loader.epoch_stream import Sampled
from gids.loader.feature_loader import FeatureLoader
from gids.loader.headroom import Headroom
from gids.loader.pack_reads import Learned
from gids.loader.readers import Features, Ids

T = TypeVar("T")


class FrameworkEpoch(Generic[T], Iterator[tuple[T, Features]]):
    """An iterator of (minibatch, {table: features}). After an error it continues with the next minibatch.

    If sampling a minibatch fails, the error is raised when that minibatch is due.

    ids_of: returns the rows of each table that a minibatch reads, on any device. bytes_of: returns the memory
    of a minibatch. in_workers: minibatches come from worker processes. If this process cannot hold a window
    of them, the window is lowered and a warning is logged. learned: what earlier epochs taught.
    """

    def __init__(
        self,
        feature_loader: FeatureLoader,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        *,
        bytes_of: Callable[[T], int],
        in_workers: bool,
        learned: Learned,
    ) -> None:
        self._headroom = Headroom() if in_workers else None
        on_cpu = feature_loader.device.type == "cpu"

        def ids_there(minibatch: T) -> Ids:
            ids = ids_of(minibatch)
            return on_host(ids) if on_cpu else ids

        source = Sampled(minibatches, goes_on=True)
        self._stream = feature_loader.attach(source, ids_there, bytes_of=bytes_of, learned=learned)

    def __next__(self) -> tuple[T, Features]:
        minibatch, features = next(self._stream)
        if self._headroom is not None:
            limit = self._headroom.window_limit(self._stream.ahead)
            if limit is not None:
                self._stream.limit_window(*limit)
        return minibatch, features

    def close(self) -> None:
        """End the epoch: reads finish, workers stop. Idempotent. Its end, and dropping it, do the same."""
        self._stream.close()
