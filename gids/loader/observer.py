"""Observer: the methods that a FeatureLoader calls while it works, to record or time it.

Called by FeatureLoader and WindowedStream. gids.trace has two observers: record() and Timeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gids.loader.stream import Cache, Ids


class Observer:
    """Base class: override the methods you need, the others do nothing.

    All are called in the consumer's thread. step counts minibatches from 0, across epochs. Streams that read
    through the cache (a validation in mid-epoch) call no method but cache_opened. An exception in a method
    reaches the training loop.
    """

    def cache_opened(self, cache: Cache) -> None:
        """The cache was built, with the first minibatch."""

    def entered(self, step: int, ids: Ids) -> None:
        """A sampled minibatch entered the window. ids: {table: int64[n]}, as the stream received them."""

    def planned(self, step: int) -> None:
        """The cache planned the minibatch and submitted its reads."""

    def gathered(self, step: int) -> None:
        """The features of the minibatch are ready."""

    def retired(self, step: int) -> None:
        """The cache dropped the minibatch's marks: after its gather, or because its stream closed."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to run a stage in: "sample", "enter", "plan" or "gather"."""
        return nullcontext()


class Observers(Observer):
    """The observers of one loader, called in the order in which they were added."""

    def __init__(self, first: Observer | None) -> None:
        self._all: list[Observer] = [] if first is None else [first]

    @contextmanager
    def added(self, observer: Observer) -> Iterator[None]:
        """Include observer while the block runs."""
        self._all.append(observer)
        try:
            yield
        finally:
            self._all.remove(observer)

    @property
    def any(self) -> bool:
        """Whether there is an observer."""
        return bool(self._all)

    def cache_opened(self, cache: Cache) -> None:
        for observer in self._all:
            observer.cache_opened(cache)

    def entered(self, step: int, ids: Ids) -> None:
        for observer in self._all:
            observer.entered(step, ids)

    def planned(self, step: int) -> None:
        for observer in self._all:
            observer.planned(step)

    def gathered(self, step: int) -> None:
        for observer in self._all:
            observer.gathered(step)

    def retired(self, step: int) -> None:
        for observer in self._all:
            observer.retired(step)

    def stage(self, name: str) -> AbstractContextManager[object]:
        return self._stages(name) if self._all else nullcontext()

    @contextmanager
    def _stages(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._all:
                stack.enter_context(observer.stage(name))
            yield
