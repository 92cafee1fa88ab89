"""LockstepStream: the minibatches of an epoch and their rows, where ranks sample and read together. It takes
the minibatches from Steps. Both are made by RankRows for each epoch.

By random reads, all ranks sample equally far ahead. By packs, they sample one superbatch after the other: all
agree on its number of steps, and each rank has sampled all of them before the first one is returned. Steps
know no tables. If rows are exchanged, those of the next step are on their way.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import torch

from gids.errors import RankError, StorageError
from gids.loader.epoch_stream import EpochStream, Failed, Sampled, without_frames
from gids.loader.learned import Learned
from gids.loader.options import MAX_PLANNED
from gids.loader.pack_chooser import EARLY
from gids.loader.ranks import place_of
from gids.loader.readers import Features, Reader
from gids.loader.row_source import EpochInput
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


class LockstepStream(EpochStream[T]):
    """The minibatches of an epoch with their features, where sampling is collective.

    By random reads, all ranks sample equally far ahead, so that they exchange in the same order: a rank with
    less memory has a shorter window, but takes part. By packs, each superbatch has a stream of its own.
    Before rows are sent, the ranks have compared where they are, when they sampled or without that.
    """

    first_alone = closes_itself = False  # the other ranks hear of its error, and of its end, first

    def __init__(
        self,
        rank_rows: RankRows,
        steps: Steps[T],
        growth: float,
        count: int | None,
        learned: Learned,
    ) -> None:
        check = rank_rows.feature_loader.check_device
        super().__init__(steps.minibatches, Reader(), count=count, check=check)
        self._rank_rows, self._group, self._loader = rank_rows, rank_rows.group, rank_rows.feature_loader
        self._steps, self._growth, self._learned = steps, growth, learned
        self._local: EpochStream[Step[T]] | None = None  # reads this rank's rows
        self._sampled_ahead: int | None = None  # steps, by random reads, the same on all ranks
        self._taken = 0  # steps

    def _take(self) -> tuple[T, Features, Exception | None]:
        group, everyone = self._group, self._rank_rows.everyone
        with group.lock:
            failures = group.failures
            try:
                return self._take_step()
            except Exception as error:
                if group.failures > failures and everyone is not group:
                    everyone.meet(self._place("ends its epoch"), error)  # other columns hear of it here
                raise

    def _take_step(self) -> tuple[T, Features, Exception | None]:
        group, comparisons = self._group, self._group.comparisons
        if self._sampled_ahead is not None:
            self._steps.sample_ahead(self._sampled_ahead)
        elif not self._steps.known:
            self._begin()
        if not self._steps.known:
            raise StopIteration
        if group.comparisons == comparisons:  # nothing was sampled
            group.meet(self._place("takes a minibatch"))
        self._send(2 if self._rank_rows.exchanged else 1)
        due = self._steps.known.popleft()
        features, error = self._receive(due)
        self._taken += 1
        return cast(T, due.step and due.step.minibatch), features, error

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        with self._lock:
            self._steps.drop()
            if self._local is not None:
                self._local.close()
            super().close()

    def _begin(self) -> None:
        """Begin the next superbatch, or to read all that is left by random reads. Collective."""
        steps = self._steps
        if self._local is not None:
            next(self._local, None)  # the superbatch before ends, and is counted
            self._local.close()
        steps.sample_ahead(1)
        if not steps.known:
            return
        place = self._place("considers packs")
        packs = self._rank_rows.agree_on_packs(self._learned, self._left, place)
        if packs:
            steps.begin_superbatch()
        self._local = self._loader.attach_epoch(
            EpochInput(
                minibatches=steps,
                ids_of=self._rank_rows.ids_of,
                learned=self._learned,
                bytes_of=lambda step: step.nbytes,
                count=self._left,
                growth=self._growth,
                packs=packs,
                together=steps,
            )
        )
        self._read(steps.known[0])  # the loader learns the size of a minibatch
        if not (packs and steps.complete()):
            ahead = self._loader.window + MAX_PLANNED + 2
            [ahead] = self._group.most([ahead], self._place("chooses a window"))
            steps.sample_ahead(ahead)
            self._sampled_ahead = ahead

    def _place(self, what: str) -> str:
        return self._steps.place(self._taken, what)

    @property
    def _left(self) -> int | None:
        """Minibatches of the epoch that were not returned, if known."""
        done = self._steps.number - len(self._steps.known)
        return None if self._count is None else self._count - done

    def _read(self, due: Due[T]) -> None:
        """Read this rank's rows for the step, unless that was done."""
        assert self._local is not None
        if due.step is not None or due.error is not None:
            return
        try:
            due.step, due.rows = next(self._local)
        except StopIteration:
            due.error = RuntimeError("there are no rows for a step that was sampled")
        except Exception as error:  # the other ranks wait
            due.error = without_frames(error)

    def _send(self, most: int) -> None:
        """Begin to send the rows of further steps, until those of so many are on their way."""
        group, counters = self._group, self._rank_rows.counts
        for due in list(islice(self._steps.known, most)):
            if due.status is not None:
                continue
            self._read(due)
            if self._rank_rows.exchanged:
                rows, due.rows = due.rows, {}  # they are with the exchange
                for names, wanted, expected in zip(
                    self._rank_rows.alike, due.wanted, due.expected, strict=True
                ):
                    away = sum(wanted) - wanted[group.rank]
                    for name in names:
                        sent = rows.pop(name) if due.error is None else self._no_rows(name, sum(wanted))
                        due.coming[name] = group.start_rows(sent, wanted, expected)
                        counters["rows sent"] += away
                        counters["bytes sent"] += away * sent.shape[1]
                counters["exchanges"] += 1
            due.status = group.start_most([int(due.error is not None)])

    def _no_rows(self, name: str, count: int) -> torch.Tensor:
        """What is sent in place of rows that could not be read."""
        table = next(t for t in self._loader.tables if t.name == name)
        return torch.zeros(count, table.row_bytes, dtype=torch.uint8, device=self._loader.device)

    def _receive(self, due: Due[T]) -> tuple[Features, StorageError | None]:
        """The features of a step; or why some rank could not read its rows."""
        group, received = self._group, {}
        for name, (rows, handle) in due.coming.items():
            group.wait_for(handle)
            received[name] = rows
        status, handle = due.status
        group.wait_for(handle)
        failed = int(status.item())
        if (everyone := self._rank_rows.everyone) is not group:
            [failed] = everyone.most([failed], self._place("has its rows"))
        if failed:
            return {}, self._error_of(due.error)
        assert due.step is not None
        if self._rank_rows.exchanged:
            due.coming.clear()
            return self._rank_rows.features_of(due.step, received), None
        return {name: due.rows[name] for name in self._rank_rows.tables}, None

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step that some rank could not read. Collective."""
        everyone = self._rank_rows.everyone
        said = everyone.gather(None if mine is None else _plain(mine), self._place("could not read"))
        if isinstance(mine, StorageError):
            return mine
        if mine is not None:
            raise mine
        rank = next(r for r, theirs in enumerate(said) if theirs is not None)
        name = everyone.name_of(rank)
        if isinstance(said[rank], str):
            raise RankError(f"{name} failed with {said[rank]}")
        errno, message, path, offset = said[rank]
        return StorageError(errno, f"{name}: {message}", path, offset)


def _plain(error: Exception) -> Any:
    """What this rank tells the others of its error."""
    if not isinstance(error, StorageError):
        return f"{type(error).__name__}: {error}"
    what = (error.strerror or "").partition(": ")[0]
    return error.errno or 0, what, error.filename, error.offset
