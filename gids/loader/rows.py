"""Rows: reads the rows of an epoch's minibatches for an EpochStream. CachedRows: through a loader's cache.

They know rows and steps. They sample nothing, and know nothing of pages, files or frameworks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
log = logging.getLogger("gids")

Ids = Mapping[str, torch.Tensor]
Features = dict[str, torch.Tensor]
Gathered = tuple[Features, Exception | None]
"""The rows of a minibatch, and an error if some could not be read."""
IdsOf = Callable[[T], Ids]


@dataclass(frozen=True, kw_only=True)
class EpochInput(Generic[T]):
    """The minibatches of an epoch, and what is known of them.

    minibatches, ids_of, bytes_of, count: as of FeatureLoader.attach(). following: returns the minibatches of
    the next epoch, which is attached with the same object then; or None. growth: size of the other
    minibatches, relative to the first. waiting_batches: the most sampled minibatches that `minibatches`
    itself holds, which RowLoader.waiting_batches limits after the first minibatch. source_bytes: returns
    other memory of `minibatches`, for the number of minibatches that it holds.
    """

    minibatches: Iterable[T]
    ids_of: IdsOf[T]
    bytes_of: Callable[[T], int] = lambda _: 0
    count: int | None = None
    growth: float = 1.0
    waiting_batches: int = 0
    source_bytes: Callable[[int], int] = lambda _waiting: 0
    following: Callable[[], Iterable[T] | None] | None = None


class Cache(Protocol):
    """The methods of a cache that are called here: gids.cache.FeatureCache, or the one on a CUDA device."""

    next_step: int

    def enter(self, step: int, ids: Ids) -> None: ...
    def plan(self, step: int) -> None: ...
    def gather(self, step: int) -> Gathered: ...
    def retire(self, step: int) -> None: ...
    def cancel(self) -> None: ...
    def read_through(self, ids: Ids) -> Gathered: ...
    def stats(self) -> dict[str, dict[str, Any]]: ...
    def memory(self) -> dict[str, int]: ...
    def page_words(self, table: str) -> npt.NDArray[np.uint64]: ...
    def close(self) -> None: ...


class Rows:
    """Of a loader without tables: there are none.

    window: minibatches that enter before the one that is planned. planned: that are planned at a time. t: the
    number of a minibatch in its epoch; they enter, are planned and are gathered in order.
    """

    @property
    def window(self) -> int:
        return 0

    @property
    def planned(self) -> int:
        return 1

    def begin(self) -> None:
        """Called before the first minibatch."""

    def ids(self, minibatch: Any) -> Ids:
        """The rows of each table that a minibatch reads."""
        return {}

    def enter(self, t: int, minibatch: Any, ids: Ids) -> None:
        """This minibatch will be gathered."""

    def plan(self, t: int) -> None:
        """Start the reads of the minibatch. Does not block."""

    def gather(self, t: int, minibatch: Any) -> Features:
        """The rows of the minibatch. Blocks. Raises StorageError, or OverflowError."""
        return {}

    def close(self) -> None:
        """Let reads finish and forget what entered. Idempotent."""


INTERRUPTED = (
    "another epoch of the same tables has begun, so this one goes on without look-ahead: for a validation in "
    "the middle of an epoch open a second source with its own memory, gids.open(PATH, memory=...)"
)


class Window(Protocol):
    """What CachedRows asks of gids.loader.memory's Placement."""

    @property
    def window(self) -> int: ...
    @property
    def most_planned(self) -> int: ...
    def planned_now(self) -> int: ...
    def cache_for(
        self,
        epoch: EpochInput[Any],
        ids: Ids,
        minibatch_bytes: int,
        *,
        build: Callable[[Any], None],
    ) -> Cache: ...


class CachedRows(Rows):
    """Rows of an epoch through the cache of a FeatureLoader. The epoch that began last has its window. One
    that lost it reads through the cache without look-ahead, and leaves no marks.

    A minibatch retires when as many later ones as may be planned at a time are planned. So what the cache
    keeps depends on no number of minibatches that are planned, and on no time.

    begin, ended: called when this gets the window, and when it closes while it has it. build: builds the
    cache.

    Attributes: has_window; gathered: number of minibatches so far.
    """

    def __init__(
        self,
        epoch: EpochInput[Any],
        placement: Window,
        *,
        begin: Callable[[CachedRows], None],
        build: Callable[[Any], None],
        ended: Callable[[CachedRows], None],
    ) -> None:
        self._epoch, self._placement = epoch, placement
        self._begin, self._build, self._ended = begin, build, ended
        self.has_window = self._warned = False
        self._cache: Cache | None = None  # that has steps of this epoch
        self._first_step = self.gathered = 0
        self._first = self._retired = 0  # minibatch that entered that cache; that retires next
        self._planned = 0  # minibatches

    @property
    def window(self) -> int:
        return self._placement.window if self.has_window else 0

    @property
    def planned(self) -> int:
        return self._placement.planned_now() if self.has_window else 1

    def begin(self) -> None:
        self._begin(self)
        self.has_window = True

    def ids(self, minibatch: Any) -> Ids:
        return self._epoch.ids_of(minibatch)

    def enter(self, t: int, minibatch: Any, ids: Ids) -> None:
        if not self.has_window:
            return
        cache = self._cache_for(minibatch, ids)
        if self._cache is None:
            cache.cancel()  # what an epoch left that was dropped, or ended by Ctrl-C
            self._cache, self._first_step, self._first = cache, cache.next_step - t, t
            self._retired = self._planned = t
        cache.enter(self._first_step + t, ids)

    def plan(self, t: int) -> None:
        if self._cache is not None and t >= self._first:
            self._cache.plan(self._first_step + t)
            self._planned = t + 1
            self._retire(self._cache, self.gathered)

    def gather(self, t: int, minibatch: Any) -> Features:
        if self._cache is not None and t >= self._first:
            features, error = self._cache.gather(self._first_step + t)
            self._retire(self._cache, t + 1)
        else:
            ids = self.ids(minibatch)
            cache = self._cache_for(minibatch, ids)
            if not self.has_window and not self._warned:
                self._warned = True
                log.warning(INTERRUPTED)
            features, error = cache.read_through(ids)
        if error is not None:
            raise error
        self.gathered = t + 1
        return features

    def _retire(self, cache: Cache, gathered: int) -> None:
        """Retire those of the gathered minibatches after which enough are planned."""
        while self._retired < min(gathered, self._planned + 1 - self._placement.most_planned):
            cache.retire(self._first_step + self._retired)
            self._retired += 1

    def lose_window(self) -> None:
        """Go on without look-ahead: another epoch has begun."""
        self.has_window = False
        self.leave()

    def leave(self) -> None:
        """Leave the cache, and what entered: minibatches that did and are gathered all the same are read
        without look-ahead."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.cancel()

    def close(self) -> None:
        if self.has_window:
            self.has_window = False
            self.leave()
            self._ended(self)

    def _cache_for(self, minibatch: Any, ids: Ids) -> Cache:
        """The cache of the loader. It is built at the first minibatch."""
        epoch = self._epoch
        nbytes = epoch.bytes_of(minibatch)
        return self._placement.cache_for(epoch, ids, nbytes, build=self._build)
