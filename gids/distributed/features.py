"""GroupFeatures: rows of tables that are divided among ranks. The owner of a row reads it for all ranks.

Made by GroupSource in place of a FeatureLoader. The ids of a step go to their owners when the step is
sampled, so the owner's window sees what all ranks will ask for. The rows of step s + 1 are on their way while
step s is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from gids.closing import Closing
from gids.distributed.group import Group
from gids.distributed.owners import Owners, split
from gids.errors import RankError, StorageError
from gids.loader.options import MAX_PLANNED
from gids.store import Table
from gids.store.dtypes import make_bools_proper
from gids.store.names import Relation

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")
Ids = Mapping[str, torch.Tensor]


class RankFeatures(ABC):
    """What EpochLoader uses of a FeatureLoader, for loaders whose ranks sample together.

    loader: reads this rank's rows. rows_of: the positions of rows that this rank has, from their ids.
    """

    def __init__(
        self,
        group: Group,
        loader: FeatureLoader,
        rows_of: Callable[[Table, torch.Tensor], torch.Tensor],
        *,
        bulk: int,
    ) -> None:
        self.group, self.loader, self.rows_of, self._bulk = group, loader, rows_of, bulk

    @property
    def window(self) -> int:
        return self.loader.window

    @property
    def waiting_batches(self) -> int:
        """The same on all ranks."""
        return self._bulk - 1

    @property
    def held_bytes(self) -> int:
        return self.loader.held_bytes

    def attach(
        self,
        minibatches: Iterable[T],
        ids_of: Callable[[T], Ids],
        *,
        bytes_of: Callable[[T], int] | None = None,
        waiting_batches: int = 0,
        source_bytes: Callable[[int], int] = lambda _waiting: 0,
        growth: float = 1.0,
        count: int | None = None,
        again: Callable[[int], Iterator[T]] | None = None,
    ) -> LockstepStream[T]:
        """Iterate over (minibatch, {table: features}), as FeatureLoader.attach. Collective."""
        return self._stream(iter(minibatches), ids_of, bytes_of or (lambda _: 0), growth, count)

    def stats(self) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads."""
        return self.loader.stats()

    def leave(self, user: object) -> None:
        self.loader.leave(user)

    @abstractmethod
    def _stream(
        self,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> LockstepStream[T]: ...


class GroupFeatures(RankFeatures):
    """The rows of tables for the minibatches of all ranks of a group.

    loader: of the tables' stored bytes. tables: those that the user wants, in the same order. owners_of: the
    owners of a table's rows, or None for edges of a partitioned dataset; owners_of_edges returns those of a
    minibatch's.
    """

    def __init__(
        self,
        group: Group,
        loader: FeatureLoader,
        tables: Mapping[str, Table],
        owners_of: Callable[[Table], Owners | None],
        owners_of_edges: Callable[[Any, Relation], np.ndarray],
        rows_of: Callable[[Table, torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None,
        bulk: int,
    ) -> None:
        super().__init__(group, loader, rows_of, bulk=bulk)
        self.tables, self.dtype = dict(tables), dtype
        self.owners = {name: owners_of(table) for name, table in self.tables.items()}
        self.owners_of_edges = owners_of_edges
        alike: dict[Any, list[str]] = {}
        for name, table in self.tables.items():
            alike.setdefault((table.type, id(self.owners[name])), []).append(name)
        self.alike = list(alike.values())
        """Names of tables whose rows have the same ids and owners."""
        self.counts = {"rows sent": 0, "bytes sent": 0, "rows asked": 0, "exchanges": 0}

    def stats(self) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads for all ranks; and ``"group"``."""
        return super().stats() | {"group": dict(self.counts)}

    def decode(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The features in rows as they are stored, uint8[n, row_bytes]."""
        table = self.tables[name]
        if table.scale is None:
            values = make_bools_proper(rows.view(table.dtype).view(len(rows), *table.shape))
        else:
            values = table.decode(rows.cpu().numpy()).to(rows.device)
        return values if self.dtype is None else values.to(self.dtype)

    def _stream(
        self,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> GroupStream[T]:
        return GroupStream(self, minibatches, ids_of, bytes_of, growth, count)


class OwnFeatures(RankFeatures):
    """The rows that this rank owns, for cooperative minibatches."""

    def _stream(
        self,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> OwnStream[T]:
        return OwnStream(self, minibatches, ids_of, bytes_of, growth, count)


@dataclass
class _Step(Generic[T]):
    """One step. Dictionaries are by table.

    inverse: for each row of the minibatch, its place among the rows that come in. expected: rows that come
    from each rank. ids: those that all ranks ask of this one, in the order of ranks. wanted: how many each
    asks.
    """

    minibatch: T
    nbytes: int
    ids: dict[str, torch.Tensor] = field(default_factory=dict)
    inverse: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: dict[str, list[int]] = field(default_factory=dict)
    wanted: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class _Coming:
    """The rows of a step on their way.

    status: of start_most: (whether a rank failed, number of the step, minus that number). error: this rank's.
    """

    rows: dict[str, tuple[torch.Tensor, Any]]
    status: tuple[torch.Tensor, Any]
    error: Exception | None


class _Asked(Iterator[_Step[T]], Generic[T]):
    """The steps that the owner's stream has not taken yet."""

    def __init__(self) -> None:
        self.steps: deque[_Step[T]] = deque()
        self.ended = False

    def __next__(self) -> _Step[T]:
        if self.steps:
            return self.steps.popleft()
        if not self.ended:
            raise RuntimeError("the window of the owner is longer than what the ranks sampled ahead")
        raise StopIteration


class LockstepStream(Closing, Generic[T], Iterator[tuple[T, dict[str, torch.Tensor]]], ABC):
    """The minibatches of an epoch with their features, where sampling is collective.

    All ranks sample equally far ahead, so that they exchange in the same order: a rank with less memory has a
    shorter window, but takes part.

    loader: reads this rank's rows.
    """

    def __init__(
        self,
        group: Group,
        loader: FeatureLoader,
        minibatches: Iterator[T],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> None:
        self._group, self._loader = group, loader
        self._minibatches, self._bytes_of = minibatches, bytes_of
        self._sampled: deque[_Step[T]] = deque()  # not handed out yet
        self._asked: _Asked[T] = _Asked()
        self._end: BaseException | None = None
        self._number = 0  # of the next step that is sampled
        self._ahead: int | None = None  # steps to sample ahead, the same on all ranks
        self._closed = False
        self._rows = loader.attach(
            self._asked,
            lambda step: step.ids,
            bytes_of=lambda step: step.nbytes,
            growth=growth,
            count=count,
        )

    def __next__(self) -> tuple[T, dict[str, torch.Tensor]]:
        if self._closed:
            raise StopIteration
        try:
            if self._ahead is None:
                self._sample_until(1)
                self._begin()
                [self._ahead] = self._group.most([self._loader.window + MAX_PLANNED + 2])
            self._sample_until(self._ahead)
            if not self._sampled:
                raise self._end or StopIteration()
            features, error = self._features()
        except BaseException:
            self.close()
            raise
        step = self._sampled.popleft()
        if error is not None:
            raise error
        return step.minibatch, features

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window of the rows that this rank reads."""
        self._rows.limit_window(batches, reason)

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        self._closed = True
        self._asked.ended = True
        self._asked.steps.clear()
        self._sampled.clear()
        self._rows.close()
        close = getattr(self._minibatches, "close", None)
        if close is not None:
            close()

    @abstractmethod
    def _begin(self) -> None:
        """Called once, with the first step: let `loader` learn the size of a minibatch."""

    @abstractmethod
    def _prepare(self, minibatch: T | None, error: Exception | None) -> _Step[T]:
        """The step of a minibatch. Collective. Raises the error, or one that names the rank that has one."""

    @abstractmethod
    def _features(self) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        """The features of the first step of _sampled, or why some rank could not read its rows."""

    def _sample_until(self, count: int) -> None:
        while len(self._sampled) < count and self._end is None:
            minibatch: T | None = None
            error: Exception | None = None
            try:
                minibatch = next(self._minibatches)
            except StopIteration:
                self._end, self._asked.ended = StopIteration(), True
                return
            except Exception as raised:  # the other ranks wait
                error = raised
            step = self._prepare(minibatch, error)
            self._number += 1
            self._sampled.append(step)
            self._asked.steps.append(step)

    def _read(self) -> tuple[dict[str, torch.Tensor] | None, Exception | None]:
        """The next step's rows that this rank reads."""
        try:
            return next(self._rows)[1], None
        except Exception as error:  # the other ranks wait
            return None, error

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step that some rank could not read. Collective."""
        told = self._group.gather(None if mine is None else _told(mine))
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

    def __init__(
        self,
        features: GroupFeatures,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> None:
        super().__init__(features.group, features.loader, minibatches, bytes_of, growth, count)
        self._of, self._ids_of = features, ids_of
        self._coming: deque[_Coming] = deque()
        self._sent = 0  # steps

    def close(self) -> None:
        self._coming.clear()
        super().close()

    def _begin(self) -> None:
        self._send(1)

    def _features(self) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        self._send(2)
        return self._receive(self._sampled[0], self._coming.popleft())

    def _prepare(self, minibatch: T | None, error: Exception | None) -> _Step[T]:
        """Send the ids of a step to their owners."""
        group, features = self._group, self._of
        step: _Step[T] | None = None

        def ask() -> list[list[torch.Tensor]]:
            nonlocal step
            if error is not None:
                raise error
            assert minibatch is not None
            step = _Step(minibatch, self._bytes_of(minibatch))
            ids = self._ids_of(minibatch)
            messages: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
            for names in features.alike:
                wanted = ids[names[0]].cpu().numpy()
                owners, table = features.owners[names[0]], features.tables[names[0]]
                if owners is not None:
                    of_ids = owners.of(wanted)
                else:
                    assert not isinstance(table.type, str)
                    of_ids = features.owners_of_edges(minibatch, table.type)
                order, counts = split(of_ids, group.size)
                inverse = np.empty(len(order), np.int64)
                inverse[order] = np.arange(len(order))
                for name in names:
                    step.inverse[name], step.expected[name] = torch.from_numpy(inverse), counts.tolist()
                sent = np.split(wanted[order], np.cumsum(counts)[:-1])
                for rank, message in enumerate(messages):
                    message.append(torch.from_numpy(sent[rank]))
                features.counts["rows asked"] += len(order) - int(counts[group.rank])
            return messages

        received = group.exchange(ask, [torch.int64] * len(features.alike), self._number)
        assert step is not None
        for i, names in enumerate(features.alike):
            of_ranks = [of_rank[i] for of_rank in received]
            rows = features.rows_of(features.tables[names[0]], torch.cat(of_ranks))
            for name in names:
                step.ids[name], step.wanted[name] = rows, [len(ids) for ids in of_ranks]
        step.nbytes += sum(ids.nbytes for ids in step.ids.values())
        return step

    def _send(self, most: int) -> None:
        """Begin to send the rows of further steps, until those of so many are on their way."""
        while len(self._coming) < min(most, len(self._sampled)):
            step, group = self._sampled[len(self._coming)], self._group
            rows, error = self._read()
            if rows is None:
                rows = {
                    t.name: torch.zeros(
                        sum(step.wanted[t.name]), t.row_bytes, dtype=torch.uint8, device=self._loader.device
                    )
                    for t in self._loader.tables
                }
            coming = {}
            for name, of_table in rows.items():
                wanted = step.wanted[name]
                coming[name] = group.start_rows(of_table, wanted, step.expected[name])
                away = sum(wanted) - wanted[group.rank]
                self._of.counts["rows sent"] += away
                self._of.counts["bytes sent"] += away * of_table.shape[1]
            self._of.counts["exchanges"] += 1
            status = group.start_most([int(error is not None), self._sent, -self._sent])
            self._sent += 1
            self._coming.append(_Coming(coming, status, error))

    def _receive(
        self, step: _Step[T], coming: _Coming
    ) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        """The features of a step; or the error of a rank that could not read its rows."""
        group = self._group
        received = {}
        for name, (rows, handle) in coming.rows.items():
            group.wait_for(handle)
            received[name] = rows
        status, handle = coming.status
        group.wait_for(handle)
        failed, number, minus_number = status.tolist()
        if number != -minus_number:
            raise RankError(
                "the ranks are at different minibatches: every rank must take as many as the others"
            )
        if failed:
            return {}, self._error_of(coming.error)
        features = {}
        for name, rows in received.items():
            inverse = step.inverse[name].to(rows.device)
            features[name] = self._of.decode(name, rows.index_select(0, inverse))
        return features, None


class OwnStream(LockstepStream[T]):
    """Cooperative minibatches with the features of this rank's input nodes."""

    def __init__(
        self,
        features: OwnFeatures,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> None:
        super().__init__(features.group, features.loader, minibatches, bytes_of, growth, count)
        self._of, self._ids_of = features, ids_of
        self._first: tuple[dict[str, torch.Tensor] | None, Exception | None] | None = None

    def _begin(self) -> None:
        self._first = self._read()

    def _prepare(self, minibatch: T | None, error: Exception | None) -> _Step[T]:
        def check() -> list[list[torch.Tensor]]:
            if error is not None:
                raise error
            return [[] for _ in range(self._group.size)]

        self._group.exchange(check, [], self._number)
        assert minibatch is not None
        step = _Step(minibatch, self._bytes_of(minibatch))
        ids = self._ids_of(minibatch)
        for table in self._loader.tables:
            step.ids[table.name] = self._of.rows_of(table, ids[table.name])
        return step

    def _features(self) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        rows, error = self._first or self._read()
        self._first = None
        [failed] = self._group.most([int(error is not None)])
        if failed:
            return {}, self._error_of(error)
        assert rows is not None
        return rows, None


def _told(error: Exception) -> Any:
    """An error as other ranks are told of it."""
    if not isinstance(error, StorageError):
        return f"{type(error).__name__}: {error}"
    what = (error.strerror or "").partition(": ")[0]
    return error.errno or 0, what, error.filename, error.offset
