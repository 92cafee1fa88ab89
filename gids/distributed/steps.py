"""Steps: the minibatches of an epoch, as the ranks sample them together. The stream of rows takes them.

Made by RankRows.attach for each epoch. By random reads, all ranks sample equally far ahead. By packs,
they sample one superbatch after the other: all agree on its number of steps, and each rank has sampled all of
them before the first one is returned. Knows no tables.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from gids.distributed.group import Group
from gids.loader.epoch_stream import Failed
from gids.loader.pack_chooser import EARLY
from gids.loader.sampled_ahead import MOST_MINIBATCHES

T = TypeVar("T")
log = logging.getLogger("gids")

_POLL_S = 0.005
_LONGEST_WAIT_S = 10.0
"""A rank that prepares its packs tells the others at least this often that it still runs."""


@dataclass(frozen=True)
class Counts:
    """How many rows of a step are exchanged: int64[groups of tables, ranks] each.

    wanted: rows that each rank asks of this one. expected: rows that come from each rank.
    """

    wanted: np.ndarray
    expected: np.ndarray


@dataclass
class Step(Generic[T]):
    """One step. Lists are by group of tables that are read alike.

    ids: positions of the rows that all ranks ask of this one, int64[n], in the order of ranks. inverse: for
    each row of the minibatch, its place among the rows that come in; empty if no rows are exchanged.
    """

    minibatch: T
    nbytes: int
    counts: Counts
    ids: list[torch.Tensor]
    inverse: list[torch.Tensor]

    def __getstate__(self) -> dict[str, Any]:
        """For the scratch file of packs, where a position takes 4 bytes."""
        narrow = [torch.from_numpy(ids.numpy().astype(np.uint32).view(np.int32)) for ids in self.ids]
        return self.__dict__ | {"ids": narrow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wide = [torch.from_numpy(ids.numpy().view(np.uint32).astype(np.int64)) for ids in state["ids"]]
        self.__dict__.update(state, ids=wide)


class Steps(Iterator[Step[T]], Generic[T]):
    """An iterator of the steps that this rank's stream of rows has not taken yet.

    make_step: makes the step of a minibatch and its number. Collective. Raises the error that it is given, or
    one that names the rank that has one. place: see Group.exchange, from the number of a step and what is
    exchanged. by_choice: packs are one choice of several (reads="auto").

    Also what PackSwitch calls Together: superbatches do not overlap.

    Attributes: known: the counts of the steps that were sampled and not handed out; number: steps sampled.
    """

    overlap = False

    def __init__(
        self,
        group: Group,
        minibatches: Iterator[T],
        make_step: Callable[[T | None, Exception | None, int], Step[T]],
        place: Callable[[int, str], str],
        *,
        by_choice: bool,
    ) -> None:
        self._group, self._minibatches, self._make_step = group, minibatches, make_step
        self.place, self._by_choice = place, by_choice
        self._waiting: deque[Step[T]] = deque()  # sampled, not taken
        self.known: deque[Counts] = deque()
        self.number = 0
        self._ended = False
        self._failed: Exception | None = None
        self._first = 0  # of a superbatch
        self._end: int | None = None  # of a superbatch; until all agree, of its first steps
        self._agreed = self._together = False

    def __next__(self) -> Step[T]:
        """The next step. By packs it is sampled if need be, which is collective."""
        if not self._waiting and self._end is not None:
            self._sample_until(min(self.number + 1, self._end))
        if self._waiting:
            return self._waiting.popleft()
        if self._ended or self._end is not None:
            raise StopIteration
        raise RuntimeError("the window of the owner is longer than what the ranks sampled ahead")

    def sample_ahead(self, count: int) -> None:
        """Sample until so many steps are known, or there are no more. Collective."""
        self._sample_until(self.number - len(self.known) + count)

    # --- a superbatch ---

    def begin_superbatch(self) -> None:
        """Begin a superbatch with the steps that are known. The stream of rows calls agree() then."""
        self._first = self.number - len(self.known)
        self._end = self._first + EARLY
        self._agreed = self._together = False

    def agree(self, wanted: int, room: int) -> int:
        """See gids.loader.pack_chooser.Together. Collective: each rank calls it once in a superbatch."""
        self._sample_until(self._first + EARLY)
        mine = min(wanted, room, MOST_MINIBATCHES - 1)
        if mine < self.number - self._first:
            mine = 0
        told: list[int] = self._group.gather(mine, self.place(self._first, "agrees on a superbatch"))
        self._agreed = True
        steps = min(told)
        if not steps:
            self._end = None
            if mine:
                level = logging.INFO if self._by_choice else logging.WARNING
                rank = self._group.name_of(told.index(0))
                log.log(level, "reading by random reads, because %s does; its log says why", rank)
            return 0
        self._end = self._first + steps
        return steps + 1

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """See gids.loader.pack_chooser.Together. Collective at the first call in a superbatch; later not."""
        if self._together:
            return
        assert self._end is not None
        self._sample_until(self._end)
        longest_s = min(_LONGEST_WAIT_S, self._group.timeout_s / 4)
        while True:
            end = time.monotonic() + longest_s
            while not ready() and time.monotonic() < end:
                time.sleep(_POLL_S)
            [left] = self._group.most([int(not ready())], self.place(self._first, "makes packs"))
            if not left:
                break
        self._together = True

    def complete(self) -> bool:
        """Take part in what this rank's stream did not, once it returned its first row, or failed to.

        Returns whether the superbatch is read by packs; otherwise all ranks go on by random reads.
        """
        if not self._agreed:
            self.agree(0, 0)
        if self._end is None:
            return False
        self.wait_for(lambda: True)
        return True

    def drop(self) -> None:
        """Drop what was sampled ahead, and end. Idempotent.

        Not called close, because the stream of each superbatch closes what it reads from.
        """
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
            failed: object = minibatch
            if isinstance(failed, Failed):  # the other ranks wait
                minibatch, error = None, failed.error
            try:
                step = self._make_step(minibatch, error, self.number)
            except Exception as raised:
                self._failed = raised
                raise
            self.number += 1
            self.known.append(step.counts)
            self._waiting.append(step)
