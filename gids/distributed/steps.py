"""Steps: the minibatches of an epoch, as the ranks sample them together. The stream of rows takes them.

Made by RankRows for each epoch. By random reads, all ranks sample equally far ahead. By packs,
they sample one superbatch after the other: all agree on its number of steps, and each rank has sampled all of
them before the first one is returned. Knows no tables.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import torch

from gids.loader.epoch_stream import Failed, Sampled
from gids.loader.pack_chooser import EARLY
from gids.loader.ranks import place_of
from gids.loader.readers import Features
from gids.loader.sampled_ahead import MOST_MINIBATCHES
from gids.loader.sampling import EpochSampling

if TYPE_CHECKING:
    from gids.distributed.rows import RankRows

T = TypeVar("T")
log = logging.getLogger("gids")

_POLL_S = 0.005
_LONGEST_WAIT_S = 10.0
"""A rank that prepares its packs tells the others at least this often that it still runs."""


@dataclass
class Step(Generic[T]):
    """What this rank reads for a step. Lists are by group of tables that are read alike.

    ids: positions of the rows that all ranks ask of this one, int64[n], in the order of ranks. inverse: for
    each row of the minibatch, its place among the rows that come in; empty if no rows are exchanged.
    """

    minibatch: T
    nbytes: int
    ids: list[torch.Tensor]
    inverse: list[torch.Tensor]

    def __getstate__(self) -> dict[str, Any]:
        """For the scratch file of packs, where a position takes 4 bytes."""
        narrow = [torch.from_numpy(ids.numpy().astype(np.uint32).view(np.int32)) for ids in self.ids]
        return self.__dict__ | {"ids": narrow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wide = [torch.from_numpy(ids.numpy().view(np.uint32).astype(np.int64)) for ids in state["ids"]]
        self.__dict__.update(state, ids=wide)


@dataclass
class Due(Generic[T]):
    """A step that was sampled and is not returned. It waits in memory, unlike the Step.

    wanted, expected: how many rows each rank asks of this one, and how many come from each, by group of
    tables, then by rank. step, rows: what was read, by table, until it is sent; or error. coming: by table,
    the rows that come, as of start_rows(). status: whether a rank failed, as of start_most().
    """

    wanted: list[list[int]]
    expected: list[list[int]]
    step: Step[T] | None = None
    rows: Features = field(default_factory=dict)
    error: Exception | None = None
    coming: dict[str, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    status: Any = None


class Steps(Iterator[Step[T]], Generic[T]):
    """An iterator of the steps that this rank's stream of rows has not taken yet.

    ids_of, bytes_of: of a minibatch, as of FeatureLoader.attach.

    Also what PackSwitch calls Together.

    Attributes: minibatches: those that are sampled; known: the steps that were sampled and not handed out;
    number: steps sampled.
    """

    def __init__(
        self,
        rank_rows: RankRows,
        sampling: EpochSampling,
        ids_of: Callable[[T], Mapping[str, torch.Tensor]],
        bytes_of: Callable[[T], int],
    ) -> None:
        self._rank_rows, self._everyone, self._epoch = rank_rows, rank_rows.everyone, sampling.epoch
        self.minibatches = Sampled(cast("Iterable[T]", sampling))
        self._ids_of, self._bytes_of = ids_of, bytes_of
        self._waiting: deque[Step[T]] = deque()  # sampled, not taken
        self.known: deque[Due[T]] = deque()
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

    def place(self, step: int, what: str) -> str:
        """See Group.exchange. step: counted from the first one of this iterator."""
        epoch = self._epoch
        return place_of(epoch.seeds.ranks.loader, epoch.number, epoch.steps.start + step, what)

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
        place = self.place(self._first, "agrees on a superbatch")
        told = self._heard(partial(self._everyone.gather, mine, place))
        self._agreed = True
        steps = min(told)
        if not steps:
            self._end = None
            if mine:
                level = logging.INFO if self._rank_rows.reads == "auto" else logging.WARNING
                rank = self._everyone.name_of(told.index(0))
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
        longest_s = min(_LONGEST_WAIT_S, self._everyone.timeout_s / 4)
        while True:
            end = time.monotonic() + longest_s
            while not ready() and time.monotonic() < end:
                time.sleep(_POLL_S)
            left_here, place = int(not ready()), self.place(self._first, "makes packs")
            [left] = self._heard(partial(self._everyone.most, [left_here], place))
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
        self.minibatches.close()

    def _heard(self, exchange: Callable[[], list[int]]) -> list[int]:
        """What all ranks say. If one failed instead, so do all later calls."""
        try:
            return exchange()
        except Exception as raised:
            self._failed = raised
            raise

    def _sample_until(self, number: int) -> None:
        """Sample the steps before this number. Collective. If one fails, so do all later calls."""
        if self._failed is not None:
            raise self._failed
        while self.number < number and not self._ended:
            try:
                minibatch: T | Failed = next(self.minibatches)
            except StopIteration:
                self._ended = True
                return
            place = self.place(self.number, "asks for rows")
            try:
                step, due = self._rank_rows.ask(minibatch, self._ids_of, self._bytes_of, place)
            except Exception as raised:
                self._failed = raised
                raise
            self.number += 1
            self.known.append(due)
            self._waiting.append(step)
