"""RowSource: what loaders that sample ask of a source. Source is one; gids.distributed's GroupSource another.

Loaders take one in place of a dataset. RowLoader: what they ask of what reads their rows.

chosen_tables: the tables that a loader reads, of one or several datasets. Features have the name of their
table. Tables of other datasets are given as `Table`s. If two tables have the same name, the user gives a
mapping from names to tables.

Lender, made by gids.open: one memory budget for all FeatureLoaders of a source. One cache has the memory at a
time. It knows which loaders have a cache and which have an open epoch, and nothing of tables.
"""

from __future__ import annotations

import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from gids.cache.budget import available_bytes
from gids.cache.device import check_device_memory
from gids.closing import Closing
from gids.cuda import Device
from gids.errors import MemoryBudgetError
from gids.io.disks import device_of
from gids.loader.facts import DatasetFacts
from gids.loader.options import Options
from gids.loader.ranks import Ranks
from gids.loader.rows import EpochInput
from gids.loader.stats import PRESENT, Stats, added, no_rows
from gids.loader.stream import EpochStream
from gids.packs import Scratch, find_scratch
from gids.sampler import Minibatch, Topology
from gids.sizes import format_bytes
from gids.store import FeatureStore, Graph, Table
from gids.store.names import describe_type
from gids.store.numbering import matched

Tables = Sequence[str | Table] | Mapping[str, str | Table]
"""Names of tables of the loader's stores, or tables of any store; or a mapping from feature names to these.
"""


def chosen_tables(source: RowSource, tables: Tables) -> dict[str, Table]:
    """The tables by the names of their features. A name, or a key, is looked up in one store after the other.

    Ids are those of the first store. Raises KeyError for a name that no store has, ValueError when two tables
    have one name, and for a table of other nodes or edges.
    """
    if isinstance(tables, str):
        raise TypeError(f"tables={tables!r}: give a list, [{tables!r}]")
    chosen: dict[str, Table] = {}
    if isinstance(tables, Mapping):
        for name, table_or_name in tables.items():
            chosen[name] = _table(source, table_or_name).named(name)
        return chosen
    for table in (_table(source, table_or_name) for table_or_name in tables):
        other = chosen.setdefault(table.name, table)
        if other.identity != table.identity:
            raise ValueError(f"two tables are called {table.name!r}: give names, tables={{'a': …, 'b': …}}")
    return chosen


def default_tables(stores: Iterable[FeatureStore], types: Collection[Any]) -> list[Table]:
    """Those that a loader takes without tables=: all of these types."""
    return [t for store in stores for t in store.tables.values() if t.type in types]


def check_table_fits(table: Table, topology: Topology, dataset: str) -> None:
    """Raise ValueError if a table does not fit the nodes and edges of this topology. dataset: its name."""
    if table.kind == "edge":
        if table.type not in topology.relations:
            raise ValueError(f"{table.name}: the dataset has no topology of this relation")
        count = topology.graphs[topology.relations.index(table.type)].num_edges
    else:
        if table.type not in topology.node_types:
            known = ", ".join(map(repr, topology.node_types))
            raise ValueError(
                f"{table.name}: no relation has nodes of type {table.type!r} (there are {known})"
            )
        count = topology.node_counts[topology.node_types.index(table.type)]
    if table.id_count != count:
        raise ValueError(
            f"{table.name} has {table.id_count} rows, and {dataset} has {count} {table.kind}s of type "
            f"{describe_type(table.type)}: tables of other datasets must be of the same {table.kind}s"
        )


def is_of_nodes(table: Table, store: FeatureStore) -> bool:
    """Whether the ids of a table, which may be in a part of a dataset, are those of a type of the store."""
    if not isinstance(table.type, str) or table.type not in store.node_types:
        return False
    return table.id_count == store.num_nodes(table.type)


def _table(source: RowSource, table: str | Table) -> Table:
    if isinstance(table, Table):
        return source.match(table)
    if not isinstance(table, str):
        raise TypeError(f"tables has a {type(table).__name__}: give names of tables, or Tables of any store")
    return source.match(source.table(table))


log = logging.getLogger("gids")


class Borrower(Protocol):
    """What Lender asks of a FeatureLoader."""

    @property
    def memories(self) -> frozenset[str]: ...
    @property
    def has_cache(self) -> bool: ...
    @property
    def has_open_epoch(self) -> bool: ...
    @property
    def kept_bytes(self) -> int: ...
    def release_cache(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Lender:
    """memory, device_memory: bytes, or None for half of what is available when the first loader asks.

    Attributes: closed; pid: of the process that opened the source; shared: the FeatureLoaders that several
    loaders may use, by what they load.
    """

    def __init__(self, memory: int | None, device_memory: int | None) -> None:
        self._memory, self._device_memory = memory, device_memory
        self._on_device: dict[int, int] = {}  # by index
        self._borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        self.shared: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._scratches: dict[Hashable, Scratch] = {}  # by the options, and the file system
        self._ended: Stats = no_rows()  # of closed loaders
        self.closed, self.pid = False, os.getpid()

    def check_open(self) -> None:
        """Raise ValueError once the source is closed."""
        if self.closed:
            raise ValueError("this source is closed: call gids.open() again")

    def scratch(self, options: Options, shards: Sequence[Path]) -> Scratch | None:
        """Where packs of these shards' tables go; None if there is no such disk, which is logged.

        Loaders with the same options whose scratch is on one file system share its limit.
        """
        chosen = options.scratch, options.scratch_bytes
        scratch = find_scratch(*chosen, shards, warn=options.reads == "pack", ranks=local_ranks())
        if scratch is None:
            return None
        devices = frozenset(map(device_of, scratch.directories))
        return self._scratches.setdefault((*chosen, devices), scratch)

    @property
    def host_bytes(self) -> int:
        """The budget in host memory."""
        if self._memory is None:
            ranks = local_ranks()
            self._memory = available_bytes(ranks) // 2
            log.info(
                "memory= is not given: taking half of the memory available%s, %s",
                f" to each of {ranks} ranks" if ranks > 1 else "",
                format_bytes(self._memory),
            )
        return self._memory

    def device_bytes(self, device: Device, cache: int | None) -> int:
        """The budget in device memory. Raises MemoryBudgetError if less than it, or than cache, is free."""
        if device.index not in self._on_device:
            free_bytes, _ = device.memory_info()
            nbytes = self._device_memory
            asked = {"device_memory": nbytes, "cache": cache}
            check_device_memory(asked, free_bytes=free_bytes, device=device.name)
            if nbytes is None:
                nbytes = free_bytes // 2
                log.info(
                    "device_memory= is not given: taking half of the free memory of %s, %s",
                    device.name,
                    format_bytes(nbytes),
                )
            self._on_device[device.index] = nbytes
        return self._on_device[device.index]

    def join(self, borrower: Borrower) -> None:
        """Called by each new FeatureLoader."""
        self._borrowers.add(borrower)

    def leave(self, borrower: Borrower, stats: Stats) -> None:
        """Called by a FeatureLoader that closes. stats: its last ones."""
        self._borrowers.discard(borrower)
        self._ended = added(self._ended, stats)

    def stats(self) -> dict[str, Any]:
        """The sum over all FeatureLoaders, without what only one of them has."""
        total = self._ended
        for borrower in self._borrowers:
            total = added(total, borrower.stats())
        return {key: value for key, value in total.items() if key not in PRESENT}

    def lend(self, to: Borrower) -> int:
        """Take the memory from idle caches of other loaders. Returns the host memory that they keep.

        Raises MemoryBudgetError if a loader that has some of the memory has an open epoch.
        """
        others = [b for b in self._borrowers if b is not to and b.memories & to.memories]
        for other in others:
            if other.has_cache and other.has_open_epoch:
                raise MemoryBudgetError(
                    f"{other!r} has an open epoch, and its cache holds the memory of this source, which "
                    f"{to!r} needs now. Loaders that read other tables, dtypes or devices share a source "
                    "only one after the other: end that epoch first (end its loop, or close() its iterator), "
                    "or give one of the two a source of its own, gids.open(PATH, memory=...)"
                )
        for other in others:
            if other.has_cache:
                log.info("%r gives its cache's memory to %r, which begins an epoch", other, to)
                other.release_cache()
        return sum(other.kept_bytes for other in others)

    def close(self) -> None:
        """Close the FeatureLoaders. Idempotent."""
        self.closed = True
        for borrower in list(self._borrowers):
            borrower.close()


def local_ranks() -> int:
    """Number of ranks on this machine, which share its memory.

    LOCAL_WORLD_SIZE (set by torchrun); without it the number of ranks of the process group; else 1.
    """
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_world_size.isdecimal():
        return max(1, int(local_world_size))
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class StepSampling(NamedTuple):
    """How a loader samples. sample: see gids.loader.sampling.sample_steps. bulk: number of minibatches to
    sample in one call; None: as suits the sampler's threads."""

    sample: Callable[..., list[Minibatch]]
    bulk: int | None


class RowLoader(Protocol):
    """Reads the rows of an epoch's minibatches: a FeatureLoader, or one whose ranks read together.

    feature_loader: the FeatureLoader that reads this rank's rows; who closes a loader calls its leave(). The
    others are those of FeatureLoader.
    """

    @property
    def feature_loader(self) -> Any: ...
    @property
    def waiting_batches(self) -> int: ...
    def attach_epoch(self, epoch: EpochInput[Minibatch]) -> EpochStream[Minibatch]: ...
    def stats(self) -> dict[str, Any]: ...


class RowSource(DatasetFacts, Closing, ABC):
    """A dataset, or several, with options and one memory budget, for loaders that sample and read rows.

    Attributes: store (the first dataset's); stores; matched (of matched_tables()); options; lender; together:
    whether all ranks of a process group sample and read together, as with several parts of a dataset.
    """

    together: bool

    def __init__(
        self, stores: Sequence[FeatureStore], matched: Mapping[Table, Table], options: Options, lender: Lender
    ) -> None:
        self.store, self.stores, self.matched = stores[0], list(stores), matched
        self.options, self.lender = options, lender

    @property
    def memory(self) -> int:
        """The budget in host memory, in bytes."""
        return self.lender.host_bytes

    def match(self, table: Table) -> Table:
        """The table by the numbers of the first dataset that has its type. Raises as matched()."""
        return self.matched.get(table) or matched(table, self.stores)

    def stats(self) -> dict[str, Any]:
        """The sums of the stats() of all loaders of this source.

        One that was dropped without close() does not count.
        """
        return self.lender.stats()

    @abstractmethod
    def graphs(self) -> list[Graph]:
        """The graphs that loaders sample from."""

    @abstractmethod
    def ranks(self, rank: int | None, world_size: int | None) -> Ranks:
        """The ranks that share the seeds of a loader with these arguments."""

    @abstractmethod
    def sampling(
        self, topology: Topology, ranks: Ranks, device: torch.device, *, cooperative: bool
    ) -> StepSampling:
        """How a loader samples. topology: of graphs(). ranks: the loader's. cooperative: these work on one
        minibatch together. Raises ValueError if that, or the device, is impossible."""

    @abstractmethod
    def feature_loader(
        self,
        user: object,
        tables: Tables,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
        cooperative: bool = False,
        pin_memory: bool = False,
    ) -> RowLoader:
        """What reads rows of these tables for a loader, its user."""

    @property
    def made_by(self) -> str:
        """The call that makes it, for errors."""
        return "gids.distributed.open()" if self.together else "gids.open()"

    def __getstate__(self) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be pickled; call {self.made_by} in each process")
