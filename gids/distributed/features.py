"""GroupFeatures: rows of tables that are divided among ranks. The owner of a row reads it for all ranks.

Made by GroupSource in place of a FeatureLoader. The ids of a step go to their owners when the step is
sampled, so the owner's window sees what all ranks will ask for. The rows of step s + 1 are on their way while
step s is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from gids.cuda import on_host
from gids.distributed.group import Group
from gids.distributed.owners import Owners, split
from gids.distributed.steps import Counts, Step, Steps, place_of
from gids.distributed.streams import GroupStream, LockstepStream, OwnStream
from gids.loader.epoch_stream import EpochStream, Sampled
from gids.loader.options import Reads
from gids.loader.pack_reads import Learned
from gids.loader.sampling import EpochSampling
from gids.store import Table
from gids.store.dtypes import make_bools_proper
from gids.store.names import Relation

if TYPE_CHECKING:
    from gids.loader.feature_loader import FeatureLoader

T = TypeVar("T")
Ids = Mapping[str, torch.Tensor]


class RankFeatures(ABC):
    """What EpochLoader uses of a FeatureLoader, for loaders whose ranks sample together.

    loader: reads this rank's rows. tables: those that the user wants, in the same order. rows_of: the
    positions of rows that this rank has, from their ids. alike: names of tables whose rows have the same ids
    and owners. reads: as of gids.open().
    """

    def __init__(
        self,
        group: Group,
        loader: FeatureLoader,
        tables: Mapping[str, Table],
        rows_of: Callable[[Table, torch.Tensor], torch.Tensor],
        alike: Sequence[Sequence[str]],
        *,
        reads: Reads,
        bulk: int,
    ) -> None:
        self._reads, self.tables = reads, dict(tables)
        self.group, self.loader, self.rows_of, self._bulk = group, loader, rows_of, bulk
        self.alike = list(alike)

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
        minibatches: EpochSampling,
        ids_of: Callable[[T], Ids],
        *,
        bytes_of: Callable[[T], int] | None = None,
        waiting_batches: int = 0,
        source_bytes: Callable[[int], int] = lambda _waiting: 0,
        growth: float = 1.0,
        count: int | None = None,
        learned: Learned | None = None,
        following: object = None,
    ) -> EpochStream[T]:
        """Iterate over (minibatch, {table: features}), as FeatureLoader.attach. Collective.

        following is not used: the ranks sample together, and none is ahead of its epoch.
        """
        epoch, source = minibatches.epoch, Sampled(cast("Iterable[T]", minibatches))

        def place(step: int, what: str) -> str:
            return place_of(epoch.seeds.ranks.loader, epoch.number, epoch.steps.start + step, what)

        make_step = partial(self._step_of, ids_of, bytes_of or (lambda _: 0), place)
        steps = Steps(self.group, source, make_step, place, by_choice=self._reads == "auto")
        return self._stream(source, steps, growth, count, learned or Learned())

    def agree_on_packs(self, learned: Learned, count: int | None, place: str) -> bool:
        """Whether all ranks may read the next minibatches by packs. Collective if the options allow packs.

        Raises ValueError on all ranks if packs are asked for and impossible on one.
        """
        if self._reads == "random" or self.loader.device.type != "cpu":
            return False
        may, reason = False, ""
        try:
            may = self.loader.may_use_packs(learned, count)
        except ValueError as error:
            reason = str(error)
        told: list[tuple[bool, str]] = self.group.gather((may, reason), place)
        for rank, (_, failed) in enumerate(told):
            if failed:
                raise ValueError(f"{self.group.name_of(rank)}: {failed}")
        return all(may for may, _ in told)

    def ids_of(self, step: Step[Any]) -> Ids:
        """The positions of the rows that this rank reads for a step, by table."""
        return self.by_table(step.ids)

    def by_table(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The value of each table, from one for each group of tables that are alike."""
        return {name: value for names, value in zip(self.alike, values, strict=True) for name in names}

    def stats(self) -> dict[str, Any]:
        """Those of FeatureLoader, of the rows that this rank reads."""
        return self.loader.stats()

    def leave(self, user: object) -> None:
        self.loader.leave(user)

    @abstractmethod
    def _stream(self, source: Sampled[T], steps: Steps[T], *epoch: Any) -> LockstepStream[T]: ...

    @abstractmethod
    def _step_of(
        self,
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        place: Callable[[int, str], str],
        minibatch: T | None,
        error: Exception | None,
        number: int,
    ) -> Step[T]:
        """See Steps: make_step."""


class GroupFeatures(RankFeatures):
    """The rows of tables for the minibatches of all ranks of a group.

    loader: of the tables' stored bytes. owners_of: the owners of a table's rows, or None for edges of a
    partitioned dataset; owners_of_edges returns those of a minibatch's.
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
        reads: Reads,
        bulk: int,
    ) -> None:
        self.dtype = dtype
        # By name: ranks send tables in this order, and each may be given its own order of them.
        self.owners = {name: owners_of(tables[name]) for name in sorted(tables)}
        self.owners_of_edges = owners_of_edges
        alike: dict[Any, list[str]] = {}
        for name, owners in self.owners.items():
            alike.setdefault((tables[name].type, id(owners)), []).append(name)
        super().__init__(group, loader, tables, rows_of, list(alike.values()), reads=reads, bulk=bulk)
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
            values = table.decode(on_host(rows).numpy()).to(rows.device)
        return values if self.dtype is None else values.to(self.dtype)

    def _stream(self, source: Sampled[T], steps: Steps[T], *epoch: Any) -> GroupStream[T]:
        return GroupStream(self, source, steps, *epoch)

    def _step_of(
        self,
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        place: Callable[[int, str], str],
        minibatch: T | None,
        error: Exception | None,
        number: int,
    ) -> Step[T]:
        """Send the ids of a step to their owners."""
        group, inverses, expected = self.group, [], []

        def ask() -> list[list[torch.Tensor]]:
            if error is not None:
                raise error
            assert minibatch is not None
            ids = on_host(ids_of(minibatch))
            messages: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
            for names in self.alike:
                wanted = ids[names[0]].numpy()
                owners, table = self.owners[names[0]], self.tables[names[0]]
                if owners is not None:
                    of_ids = owners.of(wanted)
                else:
                    assert not isinstance(table.type, str)
                    of_ids = self.owners_of_edges(minibatch, table.type)
                order, counts = split(of_ids, group.size)
                inverse = np.empty(len(order), np.int32)
                inverse[order] = np.arange(len(order), dtype=np.int32)
                inverses.append(torch.from_numpy(inverse))
                expected.append(counts)
                sent = np.split(wanted[order], np.cumsum(counts)[:-1])
                for rank, message in enumerate(messages):
                    message.append(torch.from_numpy(sent[rank]))
                self.counts["rows asked"] += len(order) - int(counts[group.rank])
            return messages

        received = group.exchange(ask, [torch.int64] * len(self.alike), place(number, "asks for rows"))
        assert minibatch is not None
        rows, wanted = [], []
        for i, names in enumerate(self.alike):
            of_ranks = [of_rank[i] for of_rank in received]
            rows.append(self.rows_of(self.tables[names[0]], torch.cat(of_ranks)))
            wanted.append([len(ids) for ids in of_ranks])
        nbytes = bytes_of(minibatch) + sum(of.nbytes for of in (*rows, *inverses))
        counts = Counts(np.array(wanted, np.int64), np.array(expected, np.int64))
        return Step(minibatch, nbytes, counts, rows, inverses)


class OwnFeatures(RankFeatures):
    """The rows that this rank owns, for cooperative minibatches."""

    def __init__(
        self,
        group: Group,
        loader: FeatureLoader,
        rows_of: Callable[[Table, torch.Tensor], torch.Tensor],
        *,
        reads: Reads,
        bulk: int,
    ) -> None:
        tables = {table.name: table for table in loader.tables}
        alike: dict[Any, list[str]] = {}
        for name, table in tables.items():
            alike.setdefault(table.type, []).append(name)
        super().__init__(group, loader, tables, rows_of, list(alike.values()), reads=reads, bulk=bulk)

    def _stream(self, source: Sampled[T], steps: Steps[T], *epoch: Any) -> OwnStream[T]:
        return OwnStream(self, source, steps, *epoch)

    def _step_of(
        self,
        ids_of: Callable[[T], Ids],
        bytes_of: Callable[[T], int],
        place: Callable[[int, str], str],
        minibatch: T | None,
        error: Exception | None,
        number: int,
    ) -> Step[T]:
        self.group.share_error(error, place(number, "is sampled"))
        assert minibatch is not None
        ids = ids_of(minibatch)
        rows = [self.rows_of(self.tables[names[0]], ids[names[0]]) for names in self.alike]
        return Step(minibatch, bytes_of(minibatch), ids=rows)
