"""Streams of minibatches and their rows, where rows are divided among ranks.

Made by RankFeatures for each epoch. GroupStream exchanges rows with other ranks; OwnStream returns those that
this rank owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from gids.distributed.steps import Step, Steps
from gids.errors import RankError, StorageError
from gids.loader.epoch_stream import EpochStream, Sampled
from gids.loader.options import MAX_PLANNED
from gids.loader.pack_reads import Learned, Together
from gids.loader.readers import Features, Reader

if TYPE_CHECKING:
    from gids.distributed.features import GroupFeatures, RankFeatures

T = TypeVar("T")


@dataclass
class Read(Generic[T]):
    """A step with the rows that this rank read for it; or the error."""

    step: Step[T] | None
    rows: Features | None
    error: Exception | None


@dataclass
class _Coming(Generic[T]):
    """The rows of a step on their way.

    status: of start_most: whether a rank failed.
    """

    read: Read[T]
    rows: dict[str, tuple[torch.Tensor, Any]]
    status: tuple[torch.Tensor, Any]


class LockstepStream(EpochStream[T], ABC):
    """The minibatches of an epoch with their features, where sampling is collective.

    By random reads, all ranks sample equally far ahead, so that they exchange in the same order: a rank with
    less memory has a shorter window, but takes part. By packs, each superbatch has a stream of its own.
    Before rows are sent, the ranks have compared where they are, when they sampled or without that.
    """

    first_alone = closes_itself = False  # the other ranks hear of its error, and of its end, first

    def __init__(
        self,
        features: RankFeatures,
        source: Sampled[T],
        steps: Steps[T],
        growth: float,
        count: int | None,
        learned: Learned,
    ) -> None:
        super().__init__(source, Reader(), count=count)
        self._learned = learned
        self._features_of, self._group, self._loader = features, features.group, features.loader
        self._steps, self._growth = steps, growth
        self._rows: EpochStream[Step[T]] | None = None  # what this rank reads
        self._sampled_ahead: int | None = None  # steps, by random reads, the same on all ranks
        self._first: Read[T] | None = None
        self._taken = 0  # steps
        self._limit: tuple[int, str] | None = None

    def _take(self) -> tuple[T, Features, Exception | None]:
        group, comparisons = self._group, self._group.comparisons
        if self._sampled_ahead is not None:
            self._steps.sample_ahead(self._sampled_ahead)
        elif not self._steps.known:
            self._begin()
        if not self._steps.known:
            raise StopIteration
        if group.comparisons == comparisons:  # nothing was sampled
            group.meet(self._place("takes a minibatch"))
        read, features, error = self._features()
        self._steps.known.popleft()
        self._taken += 1
        return cast(T, read.step and read.step.minibatch), features, error

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window of the rows that this rank reads."""
        self._limit = (batches, reason)
        if self._rows is not None:
            self._rows.limit_window(batches, reason)

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        with self._lock:
            self._first = None
            self._steps.drop()
            if self._rows is not None:
                self._rows.close()
            super().close()

    @abstractmethod
    def _features(self) -> tuple[Read[T], Features, StorageError | None]:
        """The first step that is known, with its features; or why some rank could not read its rows."""

    def _begin(self) -> None:
        """Begin the next superbatch, or to read all that is left by random reads. Collective."""
        steps = self._steps
        if self._rows is not None:
            next(self._rows, None)  # the superbatch before ends, and is counted
            self._rows.close()
        steps.sample_ahead(1)
        if not steps.known:
            return
        place = self._place("considers packs")
        packs = self._features_of.agree_on_packs(self._learned, self._left, place)
        if packs:
            steps.begin_superbatch()
        self._attach(steps if packs else None)
        self._first = self._read_next()  # the loader learns the size of a minibatch
        if not (packs and steps.complete()):
            ahead = self._loader.window + MAX_PLANNED + 2
            [ahead] = self._group.most([ahead], self._place("chooses a window"))
            steps.sample_ahead(ahead)
            self._sampled_ahead = ahead

    def _place(self, what: str) -> str:
        return self._steps.place(self._taken, what)

    def _attach(self, together: Together | None) -> None:
        self._rows = self._loader.attach(
            self._steps,
            self._features_of.ids_of,
            bytes_of=lambda step: step.nbytes,
            growth=self._growth,
            count=self._left,
            together=together,
            learned=self._learned,
        )
        if self._limit is not None:
            self._rows.limit_window(*self._limit)

    @property
    def _left(self) -> int | None:
        """Minibatches of the epoch that were not returned, if known."""
        done = self._steps.number - len(self._steps.known)
        return None if self._count is None else self._count - done

    def _read(self) -> Read[T]:
        """The next step, with the rows that this rank reads."""
        first, self._first = self._first, None
        return self._read_next() if first is None else first

    def _read_next(self) -> Read[T]:
        assert self._rows is not None
        try:
            step, rows = next(self._rows)
        except StopIteration:
            return Read(None, None, RuntimeError("there are no rows for a step that was sampled"))
        except Exception as error:  # the other ranks wait
            return Read(None, None, error)
        return Read(step, rows, None)

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step that some rank could not read. Collective."""
        told = self._group.gather(None if mine is None else _told(mine), self._place("could not read"))
        if isinstance(mine, StorageError):
            return mine
        if mine is not None:
            raise mine
        rank = next(r for r, of_rank in enumerate(told) if of_rank is not None)
        name = self._group.name_of(rank)
        if isinstance(told[rank], str):
            raise RankError(f"{name} failed with {told[rank]}")
        errno, message, path, offset = told[rank]
        return StorageError(errno, f"{name}: {message}", path, offset)


class GroupStream(LockstepStream[T]):
    """Minibatches with rows of other ranks. The rows of the next step are on their way."""

    def __init__(self, features: GroupFeatures, *epoch: Any) -> None:
        super().__init__(features, *epoch)
        self._of = features
        self._coming: deque[_Coming[T]] = deque()

    def close(self) -> None:
        self._coming.clear()
        super().close()

    def _features(self) -> tuple[Read[T], Features, StorageError | None]:
        self._send(2)
        return self._receive(self._coming.popleft())

    def _send(self, most: int) -> None:
        """Begin to send the rows of further steps, until those of so many are on their way."""
        known = self._steps.known
        while len(self._coming) < min(most, len(known)):
            counts, read, group = known[len(self._coming)], self._read(), self._group
            coming = {}
            for i, names in enumerate(self._of.alike):
                wanted, expected = counts.wanted[i].tolist(), counts.expected[i].tolist()
                away = sum(wanted) - wanted[group.rank]
                for name in names:
                    rows = self._no_rows(name, sum(wanted)) if read.rows is None else read.rows[name]
                    coming[name] = group.start_rows(rows, wanted, expected)
                    self._of.counts["rows sent"] += away
                    self._of.counts["bytes sent"] += away * rows.shape[1]
            self._of.counts["exchanges"] += 1
            status = group.start_most([int(read.error is not None)])
            read.rows = None  # they are with the exchange
            self._coming.append(_Coming(read, coming, status))

    def _no_rows(self, name: str, count: int) -> torch.Tensor:
        """What is sent in place of rows that could not be read."""
        table = next(t for t in self._loader.tables if t.name == name)
        return torch.zeros(count, table.row_bytes, dtype=torch.uint8, device=self._loader.device)

    def _receive(self, coming: _Coming[T]) -> tuple[Read[T], Features, StorageError | None]:
        """The features of a step; or the error of a rank that could not read its rows."""
        group, read = self._group, coming.read
        received = {}
        for name, (rows, handle) in coming.rows.items():
            group.wait_for(handle)
            received[name] = rows
        status, handle = coming.status
        group.wait_for(handle)
        if status.item():
            return read, {}, self._error_of(read.error)
        assert read.step is not None
        features = {}
        inverse = self._of.by_table(read.step.inverse)
        for name in self._of.tables:
            rows = received.pop(name)
            features[name] = self._of.decode(name, rows.index_select(0, inverse[name].to(rows.device)))
        return read, features, None


class OwnStream(LockstepStream[T]):
    """Cooperative minibatches with the features of this rank's input nodes."""

    def _features(self) -> tuple[Read[T], Features, StorageError | None]:
        read = self._read()
        [failed] = self._group.most([int(read.error is not None)], self._place("has its rows"))
        if failed:
            return read, {}, self._error_of(read.error)
        assert read.rows is not None
        return read, {name: read.rows[name] for name in self._features_of.tables}, None


def _told(error: Exception) -> Any:
    """What this rank tells the others of its error."""
    if not isinstance(error, StorageError):
        return f"{type(error).__name__}: {error}"
    what = (error.strerror or "").partition(": ")[0]
    return error.errno or 0, what, error.filename, error.offset
