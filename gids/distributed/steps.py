"""Steps: the minibatches of an epoch, as the ranks sample them together. The stream of rows takes them.

Made by RankFeatures.attach for each epoch. All ranks sample equally far ahead. Knows no tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from gids.distributed.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """How many rows of a step are exchanged: int64[groups of tables, ranks] each.

    wanted: rows that each rank asks of this one. expected: rows that come from each rank.
    """

    wanted: np.ndarray
    expected: np.ndarray


NO_COUNTS = Counts(np.empty((0, 0), np.int64), np.empty((0, 0), np.int64))


@dataclass
class Step(Generic[T]):
    """One step. Lists are by group of tables that are read alike.

    ids: positions of the rows that all ranks ask of this one, int64[n], in the order of ranks. inverse: for
    each row of the minibatch, its place among the rows that come in.
    """

    minibatch: T
    nbytes: int
    counts: Counts = NO_COUNTS
    ids: list[torch.Tensor] = field(default_factory=list)
    inverse: list[torch.Tensor] = field(default_factory=list)


class Steps(Iterator[Step[T]], Generic[T]):
    """An iterator of the steps that this rank's stream of rows has not taken yet.

    make_step: makes the step of a minibatch and its number. Collective. Raises the error that it is given, or
    one that names the rank that has one.

    Attributes: known: the counts of the steps that were sampled and not handed out; number: steps sampled.
    """

    def __init__(
        self,
        group: Group,
        minibatches: Iterator[T],
        make_step: Callable[[T | None, Exception | None, int], Step[T]],
    ) -> None:
        self._group, self._minibatches, self._make_step = group, minibatches, make_step
        self._waiting: deque[Step[T]] = deque()  # sampled, not taken
        self.known: deque[Counts] = deque()
        self.number = 0
        self._ended = False
        self._failed: Exception | None = None

    def __next__(self) -> Step[T]:
        if self._waiting:
            return self._waiting.popleft()
        if self._ended:
            raise StopIteration
        raise RuntimeError("the window of the owner is longer than what the ranks sampled ahead")

    def sample_ahead(self, count: int) -> None:
        """Sample until so many steps are known, or there are no more. Collective."""
        self._sample_until(self.number - len(self.known) + count)

    def close(self) -> None:
        """Drop what was sampled ahead. Idempotent."""
        self._ended, self._failed = True, None
        self._waiting.clear()
        self.known.clear()
        close = getattr(self._minibatches, "close", None)
        if close is not None:
            close()

    def _sample_until(self, number: int) -> None:
        """Sample the steps before this number. Collective. If one fails, so do all later calls."""
        if self._failed is not None:
            raise self._failed
        while self.number < number and not self._ended:
            minibatch: T | None = None
            error: Exception | None = None
            try:
                minibatch = next(self._minibatches)
            except StopIteration:
                self._ended = True
                return
            except Exception as raised:  # the other ranks wait
                error = raised
            try:
                step = self._make_step(minibatch, error, self.number)
            except Exception as raised:
                self._failed = raised
                raise
            self.number += 1
            self.known.append(step.counts)
            self._waiting.append(step)
