"""Readers: how an EpochStream reads the rows of minibatches. PackReader, in pack_switch, is one more.

A reader knows rows and steps. It samples nothing, and knows nothing of pages, files or frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gids.cache.feature_cache import ClosedCacheError

Ids = Mapping[str, torch.Tensor]
Features = dict[str, torch.Tensor]
Gathered = tuple[Features, Exception | None]
"""The rows of a minibatch, and an error if some could not be read."""


class Cache(Protocol):
    """The methods of a cache that readers call: gids.cache.FeatureCache, or the one on a CUDA device."""

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


CacheFor = Callable[[Any, Ids, bool], Cache]
"""The cache for a minibatch and its ids; whether it is the first, which tells how large minibatches are."""


class Reader:
    """Reads the rows of minibatches in the order in which they enter. This one is of loaders without tables.

    window: minibatches that enter before the one that is planned. planned: that are planned at a time.
    by_ids: whether enter() needs ids.
    """

    by_ids = True

    @property
    def window(self) -> int:
        return 0

    @property
    def planned(self) -> int:
        return 1

    def enter(self, minibatch: Any, ids: Ids) -> None:
        """This minibatch will be gathered."""

    def plan(self) -> None:
        """Start the reads of the next minibatch. Does not block."""

    def gather(self) -> Gathered:
        """Of the next minibatch. Blocks."""
        return {}, None

    def close(self) -> None:
        """Let reads finish and forget what entered. Idempotent."""


class CacheReader(Reader):
    """Reads ahead through the cache of a loader. window_batches, planned_batches: called before each step,
    because the first minibatch may change them."""

    def __init__(
        self, cache_for: CacheFor, window_batches: Callable[[], int], planned_batches: Callable[[], int]
    ) -> None:
        self._cache_for, self._window_batches, self._planned_batches = (
            cache_for,
            window_batches,
            planned_batches,
        )
        self._cache: Cache | None = None
        self._entered = self._planned = self._gathered = 0  # steps of the cache

    @property
    def window(self) -> int:
        return self._window_batches()

    @property
    def planned(self) -> int:
        return self._planned_batches()

    def enter(self, minibatch: Any, ids: Ids) -> None:
        cache = self._cache_for(minibatch, ids, self._cache is None)
        if self._cache is None:
            cache.cancel()  # Ctrl-C may have interrupted that of the stream before
            self._cache = cache
            self._entered = self._planned = self._gathered = cache.next_step
        cache.enter(self._entered, ids)
        self._entered += 1

    def plan(self) -> None:
        assert self._cache is not None
        self._cache.plan(self._planned)
        self._planned += 1

    def gather(self) -> Gathered:
        assert self._cache is not None
        gathered = self._cache.gather(self._gathered)
        self._cache.retire(self._gathered)
        self._gathered += 1
        return gathered

    def close(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.cancel()


class ThroughReader(Reader):
    """Reads through a cache whose window is another stream's: no lookahead and no marks."""

    def __init__(self, cache_for: CacheFor) -> None:
        self._cache_for = cache_for
        self._due: tuple[Cache, Any, Ids] | None = None

    def enter(self, minibatch: Any, ids: Ids) -> None:
        self._due = self._cache_for(minibatch, ids, False), minibatch, ids

    def gather(self) -> Gathered:
        due, self._due = self._due, None
        assert due is not None
        cache, minibatch, ids = due
        while True:
            try:
                return cache.read_through(ids)
            except ClosedCacheError:  # another thread has freed it meanwhile
                cache = self._cache_for(minibatch, ids, False)
