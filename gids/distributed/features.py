"""GroupFeatures: rows of tables that are divided among ranks. The owner of a row reads it, once for all ranks.

Made by GroupSource in place of a FeatureLoader. The ids of a step go to their owners when the step is sampled, so the
owner's window sees what all ranks will ask for. The rows of step s + 1 are on their way while step s is
trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from gids.store.names import Relation

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")
Ids = Mapping[str, torch.Tensor]


class GroupFeatures:
    """The rows of tables for the minibatches of all ranks of a group. What EpochLoader uses of FeatureLoader.

    loader: a FeatureLoader of the tables' stored bytes, as this rank has them. tables: those that the user
    wants, in the same order. owners_of: the owners of a table's rows, or None for edges of a partitioned
    dataset; owners_of_edges returns those of a minibatch's. rows_of: the positions of rows that this rank has,
    from their ids.
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
        self.rows_of = rows_of
        self.group, self._loader, self.tables = group, loader, dict(tables)
        self.dtype, self._bulk = dtype, bulk
        self.owners = {name: owners_of(table) for name, table in self.tables.items()}
        self.owners_of_edges = owners_of_edges
        alike: dict[Any, list[str]] = {}
        for name, table in self.tables.items():
            alike.setdefault((table.type, id(self.owners[name])), []).append(name)
        self.alike = list(alike.values())
        """Names of tables whose rows have the same ids and owners."""
        self.counts = {"rows sent": 0, "bytes sent": 0, "rows asked": 0, "exchanges": 0}

    @property
    def window(self) -> int:
        return self._loader.window

    @property
    def waiting_batches(self) -> int:
        """The same on all ranks, which sample together."""
        return self._bulk - 1

    @property
    def held_bytes(self) -> int:
        return self._loader.held_bytes

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
    ) -> GroupStream[T]:
        """Iterate over (minibatch, {table: features}), as FeatureLoader.attach. Collective."""
        return GroupStream(self, iter(minibatches), ids_of, bytes_of or (lambda _: 0), growth, count)

    def stats(self) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads for all ranks; and ``"group"``."""
        return self._loader.stats() | {"group": dict(self.counts)}

    def leave(self, user: object) -> None:
        self._loader.leave(user)

    def decode(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The features in rows as they are stored, uint8[n, row_bytes]."""
        table = self.tables[name]
        if table.scale is None:
            values = rows.view(table.dtype).view(len(rows), *table.shape)
        else:
            values = table.decode(rows.cpu().numpy()).to(rows.device)
        return values if self.dtype is None else values.to(self.dtype)


@dataclass
class _Step(Generic[T]):
    """One step. Dictionaries are by table.

    inverse: for each row of the minibatch, its place among the rows that come in. expected: rows that come from
    each rank. ids: those that all ranks ask of this one, in the order of ranks. wanted: how many each asks.
    """

    minibatch: T
    nbytes: int
    ids: dict[str, torch.Tensor] = field(default_factory=dict)
    inverse: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: dict[str, list[int]] = field(default_factory=dict)
    wanted: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class _Coming:
    """The rows of a step on their way. status: of start_most: (whether a rank failed, number of the step, minus the number).
    error: of this rank."""

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


class GroupStream(Closing, Generic[T], Iterator[tuple[T, dict[str, torch.Tensor]]]):
    """The minibatches of an epoch with their features. Each step is collective.

    The order of exchanges is the same on all ranks: each step asks for the rows of the steps that come into the
    window, then sends those of the next step.
    """

    def __init__(
        self,
        features: GroupFeatures,
        minibatches: Iterator[T],
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        growth: float,
        count: int | None,
    ) -> None:
        self._features, self._group = features, features.group
        self._minibatches, self._ids_of, self._bytes_of = minibatches, ids_of, bytes_of
        self._sampled: deque[_Step[T]] = deque()  # not handed out yet
        self._coming: deque[_Coming] = deque()
        self._asked: _Asked[T] = _Asked()
        self._end: BaseException | None = None
        self._number = self._begun = 0  # of the next step that is sampled, or whose rows are sent
        self._ahead: int | None = None  # steps to sample ahead, the same on all ranks
        self._closed = False
        self._owner = features._loader.attach(
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
            self._fill()
            if not self._sampled:
                raise self._end or StopIteration()
            coming = self._coming.popleft()
            features, error = self._receive(self._sampled[0], coming)
        except BaseException:
            self.close()
            raise
        step = self._sampled.popleft()
        if error is not None:
            raise error
        return step.minibatch, features

    def limit_window(self, batches: int, reason: str) -> None:
        """Limit the window of the rows that this rank reads."""
        self._owner.limit_window(batches, reason)

    def close(self) -> None:
        """Drop what was sampled ahead and let reads finish. Idempotent. Not collective."""
        self._closed = True
        self._asked.ended = True
        self._asked.steps.clear()
        self._sampled.clear()
        self._coming.clear()
        self._owner.close()
        close = getattr(self._minibatches, "close", None)
        if close is not None:
            close()

    def _fill(self) -> None:
        if self._ahead is None:
            self._sample_until(1)
            self._send(1)
            most = self._features.window + MAX_PLANNED + 2
            [self._ahead] = self._group.most([most])
        self._sample_until(self._ahead)
        self._send(2)

    def _sample_until(self, count: int) -> None:
        while len(self._sampled) < count and self._end is None:
            minibatch: T | None = None
            error: Exception | None = None
            try:
                minibatch = next(self._minibatches)
            except StopIteration:
                self._end, self._asked.ended = StopIteration(), True
                return
            except RankError:
                raise
            except Exception as raised:
                error = raised
            step = self._ask(minibatch, error)
            self._sampled.append(step)
            self._asked.steps.append(step)

    def _ask(self, minibatch: T | None, error: Exception | None) -> _Step[T]:
        """Send the ids of a step to their owners."""
        group, features = self._group, self._features
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
                sent = torch.from_numpy(wanted[order]).split(counts.tolist())
                for rank, message in enumerate(messages):
                    message.append(sent[rank])
                features.counts["rows asked"] += len(order) - int(counts[group.rank])
            return messages

        received = group.exchange(ask, [torch.int64] * len(features.alike), self._number)
        assert step is not None
        self._number += 1
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
            step, error = self._sampled[len(self._coming)], None
            loader, group = self._features._loader, self._group
            try:
                _, rows = next(self._owner)
            except Exception as raised:  # the other ranks wait for these rows
                error = raised
                rows = {
                    t.name: torch.zeros(
                        sum(step.wanted[t.name]), t.row_bytes, dtype=torch.uint8, device=loader.device
                    )
                    for t in loader.tables
                }
            coming = {}
            for name, of_table in rows.items():
                wanted = step.wanted[name]
                coming[name] = group.start_rows(of_table, wanted, step.expected[name])
                away = sum(wanted) - wanted[group.rank]
                self._features.counts["rows sent"] += away
                self._features.counts["bytes sent"] += away * of_table.shape[1]
            self._features.counts["exchanges"] += 1
            number = self._begun
            self._begun += 1
            status = group.start_most([int(error is not None), number, -number])
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
            raise RankError("the ranks are at different minibatches: every rank must take as many as the others")
        if failed:
            return {}, self._error_of(coming.error)
        features = {}
        for name, rows in received.items():
            inverse = step.inverse[name].to(rows.device)
            features[name] = self._features.decode(name, rows.index_select(0, inverse))
        return features, None

    def _error_of(self, mine: Exception | None) -> StorageError:
        """What to raise for a step that some rank could not read. Collective."""
        group = self._group
        told = group.gather(
            None
            if mine is None
            else (isinstance(mine, StorageError), mine.errno or 0, mine.strerror or "", mine.filename, mine.offset)
            if isinstance(mine, StorageError)
            else (False, f"{type(mine).__name__}: {mine}")
        )
        if mine is not None:
            if not isinstance(mine, StorageError):
                raise mine
            return mine
        rank = next(r for r, of_rank in enumerate(told) if of_rank is not None)
        if not told[rank][0]:
            raise RankError(f"{group.name_of(rank)} failed with {told[rank][1]}")
        _, errno, message, path, offset = told[rank]
        return StorageError(errno, f"{group.name_of(rank)}: {message.partition(':')[0]}", path, offset)
