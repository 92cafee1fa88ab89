"""FeatureLoader: attaches features to a stream of sampled minibatches.

It composes store, I/O engine, cache and window, and decides which stream has the window, and from whom memory
is borrowed. The other loaders and the adapters use it.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from gids import _core, cuda
from gids.cache import page_heat
from gids.cache.budget import (
    Sizes,
    affordable_depth,
    longest_read_bytes,
    row_orders,
)
from gids.cache.device.state import check_policy
from gids.cache.output_dtype import check_out_dtype
from gids.closing import Closing, OwnLock
from gids.errors import MissingError
from gids.io import Engine, open_engine, queue_depth
from gids.loader.epoch_stream import Ending, EpochStream, Failed, IdsOf, Sampled
from gids.loader.learned import Learned
from gids.loader.memory import (
    KEPT_HEAT,
    DevicePlacement,
    HostPlacement,
    Placement,
    Rows,
    check_minibatch_rows,
    larger,
)
from gids.loader.options import explain_names
from gids.loader.pack_reads import PackReads
from gids.loader.pack_switch import PackSwitch
from gids.loader.readers import Cache, CacheReader, Ids, ThroughReader
from gids.loader.row_source import EpochInput, Tables, chosen_tables, is_of_nodes
from gids.loader.source import Dataset, Source, as_source
from gids.loader.stats import Stats, added, between, epoch_summary
from gids.packs import MOST_ROWS, OnDevice
from gids.store import FeatureStore, Table

T = TypeVar("T")
log = logging.getLogger("gids")

_WAITING_SHARE = 8
"""Beside packs minibatches are sampled in bulk if that takes at most an eighth of the memory."""

_DROPPED_S = 60.0
"""The longest wait for another thread to close a stream."""


class FeatureLoader(Closing):
    """Feature rows for sampled minibatches, read ahead through a cache.

    Args:
        source: gids.open(...), or a path or FeatureStore for default options; or a list of these.
        tables: the tables to load: names, such as ``"paper.feat"``, and tables of other stores, such as
            ``other.table("paper.text")``; or a mapping from feature names to these.
        dtype: dtype of the features: float32, float16 or bfloat16, for tables stored as one of these. Rows
            are converted while they are gathered. Default: the stored dtype; float32 for int8 with a scale.
        device: ``"cpu"`` (default) or ``"cuda"``. On CUDA the cache and the features are in device memory,
            GPU threads request the missing pages, and ids may be on that device or on the CPU.
        minibatch_rows: rows that the largest minibatch reads: of each table, or by table. Memory is divided
            for such minibatches. Default: a quarter more than the first minibatch reads; as many where memory
            is short.

    The memory is the source's. It is taken when an epoch begins, from idle loaders of the same source.

    Raises KeyError for a table, or a heat, that the store does not have, ValueError for a number out of its
    range, StorageError for shards that cannot be opened, ImportError and RuntimeError when device="cuda"
    finds no CuPy or no usable driver. MemoryBudgetError (a ValueError) is raised at the first minibatch,
    which shows how much memory a minibatch needs; or at once if device_memory is more than is free.
    """

    @explain_names("gids.FeatureLoader")
    def __init__(
        self,
        source: Source | Dataset | Sequence[Dataset],
        tables: Tables,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        minibatch_rows: int | Mapping[str, int] | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._opened = ExitStack()  # the cache ends before the engine that it reads by
        self.source = as_source(source, self._opened)
        self._options = options = self.source.options
        self.store = self.source.store
        if not tables:
            raise ValueError("tables is empty: give at least one name, such as 'paper.feat'")
        chosen = chosen_tables(self.source, tables).values()
        if of_part := [t.name for t in chosen if t.in_part is not None]:
            raise ValueError(
                f"{of_part[0]} is in a part of a dataset: open the directory of all parts with "
                "gids.distributed.open(), or give the table of the whole dataset"
            )
        self.tables: list[Table] = [t.opened(check_crc=options.check_crc) for t in chosen]
        expected = check_minibatch_rows(minibatch_rows, [t.name for t in self.tables])
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(device)!r} is not supported: use 'cpu' or 'cuda'")
        check_out_dtype(dtype)
        self.dtype = dtype
        self._heat_methods = {t.name: _choose_heat(self.store, t, options.heat) for t in self.tables}
        self._kept_pages: dict[str, npt.NDArray[np.bool_]] = {}
        self._heats = {  # maps, which stay if the dataset is replaced
            t.name: (self.store.heat(method, t.type), self.store.owners(t.type))
            for t in self.tables
            if (method := self._heat_methods[t.name]) is not None and isinstance(t.type, str)
        }
        on_cpu = self.device.type == "cpu"
        shards = [shard for t in self.tables for shard in t.shards]
        # On a device, no more requests are in flight than staging holds.
        budget = self.source.memory if on_cpu else 8 * options.staging
        depth = options.queue_depth or queue_depth(shards, options.engine)
        depth = affordable_depth(self.tables, depth, budget)
        self._engine: Engine = open_engine(
            shards,
            kind=options.engine,
            depth=depth,
            threads=options.io_threads or 0,
            reads_per_s=options.reads_per_s or 0,
            direct=options.direct,
            max_read_bytes=longest_read_bytes(self.tables, memory_bytes=budget, queue_depth=depth),
        )
        self._opened.callback(self._engine.close)
        self._finalizer = weakref.finalize(self, self._opened.close)
        self._placement: Placement = (
            HostPlacement(self._engine, self.tables, options, self.source.memory, dtype, expected)
            if on_cpu
            else self._on_device(expected)
        )
        self._opened.callback(self._placement.end.close)
        packs_on: OnDevice | None = None
        if isinstance(self._placement, DevicePlacement) and options.reads != "random":
            packs_on = OnDevice(self._placement.device, self._placement.memory_bytes)
        self._learned = Learned()
        self._open_learned = weakref.ref(self._learned)  # of the stream that has the window, or had it last
        self._packs = PackReads(self.tables, options, dtype, self._engine, self.source.lender, packs_on)
        self._windowed: tuple[weakref.ref[EpochStream[Any]], Ending] | None = None
        self._streams: weakref.WeakSet[EpochStream[Any]] = weakref.WeakSet()  # the open ones, perhaps others
        self._ends = False  # close() was called: no stream begins that it does not close
        self._seconds = {"sample": 0.0}
        self._last_stats: dict[str, Any] | None = None  # once closed
        self._shares: weakref.WeakKeyDictionary[Learned, Stats] = weakref.WeakKeyDictionary()
        # Whose streams read now, and stats() as that began. Weak: what is prepared of a dropped loader's next
        # epoch ends with it.
        self._turn: tuple[weakref.ref[Learned], Stats] = weakref.ref(self._learned), {}
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """The loaders that share this one: see Source.feature_loader."""
        self.source.lender.join(self)

    @property
    def feature_loader(self) -> FeatureLoader:
        """This loader. See RowLoader."""
        return self

    def _on_device(self, expected: Rows | None) -> DevicePlacement:
        options = self._options
        check_policy(options.policy)
        if options.memory is not None and options.memory < options.staging:
            raise ValueError(
                f"staging={options.staging} is more than memory={options.memory}, which must hold it: lower "
                "staging= or raise memory= of gids.open()"
            )
        device = cuda.open_device(self.device)
        self.device = torch.device("cuda", device.index)  # also if another device becomes torch's current one
        memory_bytes = self.source.lender.device_bytes(device, options.cache)
        return DevicePlacement(device, self._engine, self.tables, options, memory_bytes, self.dtype, expected)

    def check_device(self) -> None:
        """Raise RuntimeError while a CUDA graph is captured, and in a forked child, which has neither the
        device nor the memory that it reads: no minibatch can be taken there."""
        if self.cuda_device is not None:
            if os.getpid() != self._pid:
                raise RuntimeError("this loader was opened before a fork: call gids.open() in this process")
            self.cuda_device.check_not_capturing()

    @property
    def cuda_device(self) -> cuda.Device | None:
        """The device of the cache; None if it is in host memory."""
        return self._placement.device if isinstance(self._placement, DevicePlacement) else None

    @property
    def window(self) -> int:
        """Number of minibatches sampled ahead: as given; after the first minibatch, as memory allows."""
        return self._placement.window

    @property
    def waiting_batches(self) -> int:
        """Minibatches that the source of attach() may hold: as given there, then as memory allows."""
        return self._placement.waiting

    @property
    def held_bytes(self) -> int:
        """Memory of the sampled minibatches that are held at once.

        In stats()["memory"] they are "minibatches", or part of "window".
        """
        packs = self._packs.memory()
        return packs["minibatches"] if packs else self._placement.held_bytes

    @property
    def engine(self) -> Engine:
        """The I/O engine, for its counters. The loader closes it."""
        return self._engine

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def memories(self) -> frozenset[str]:
        """The memories that the cache takes: "host", "cuda:INDEX", or both."""
        packs = self._packs.on_device and (self._options.reads == "pack" or self._packs.machine is not None)
        return self._placement.memories | (frozenset({"host"}) if packs else frozenset())

    @property
    def has_cache(self) -> bool:
        return self._cache is not None or self._packs.machine is not None

    @property
    def has_open_epoch(self) -> bool:
        return any(stream.open for stream in self._streams)

    @property
    def kept_bytes(self) -> int:
        """Host memory that stays taken without a cache.

        The bounce pool, orders that were compared, and what is prepared of next epochs.
        """
        if self.closed:
            return 0
        return self._engine.bounce_bytes + sum(row_orders(self.tables).values()) + self._packs.next_bytes

    @property
    def _cache(self) -> Cache | None:
        return self._placement.cache

    def release_cache(self) -> None:
        """Free the cache, between two epochs. The next minibatch makes a new one; counters go on."""
        self._packs.release()
        self._placement.release()

    def expect_rows(self, minibatch_rows: int | Mapping[str, int]) -> None:
        """Leave room for minibatches of this number of rows, from the next epoch on. See minibatch_rows."""
        rows = check_minibatch_rows(minibatch_rows, [t.name for t in self.tables])
        assert rows is not None
        wanted = larger(rows, self._placement.expected or {})
        if wanted != self._placement.expected:
            self._placement.expected = wanted
            if not self.has_open_epoch:
                self.release_cache()

    def check_user(self, user: object) -> None:
        """Raise ValueError if a loader that shares this one is closed."""
        if user not in self.users:
            raise ValueError(f"this {type(user).__name__} is closed: make a new one")

    def leave(self, user: object) -> None:
        """Called by a loader that shares this one, when it is closed. The last one closes this, unless the
        iterator of a loader that was dropped is in use."""
        self._packs.free_kept()
        with self._lock:
            self.users.discard(user)
            if self.users or any(not stream.closed for stream in self._streams):
                return
            shared = self.source.lender.shared  # another thread may make a loader meanwhile
            for key in [key for key, loader in shared.items() if loader is self]:
                del shared[key]
        self.close()

    def attach(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        *,
        bytes_of: Callable[[T], int] | None = None,
        count: int | None = None,
    ) -> EpochStream[T]:
        """Iterate over (minibatch, {table: features}).

        Args:
            minibatches: sampled in the consumer's thread, ahead by the window.
            ids_of: returns the rows that a minibatch reads: int64[n] for each table, on the CPU or on the
                loader's device, may repeat. Features are [n, *shape] of the table's dtype, in that order. The
                consumer owns them. On CUDA they are ready for the stream that is current when the minibatch
                is handed out.
            bytes_of: returns the memory of a sampled minibatch. It counts as part of the window, on CUDA as
                "minibatches", outside the budget.
            count: number of minibatches, if known: it helps to choose how they are read.

        Memory is divided once, at the first minibatch. A minibatch larger than it was divided for goes above
        it, with one warning, which names minibatch_rows.

        One stream at a time has the window: the one that began last. A stream begins with its first
        minibatch. One that began before goes on without lookahead, until the other one ends. While a stream
        reads by packs, it keeps the window. A stream ends with its last minibatch, by close(), or when it is
        dropped.

        Raises, when the minibatch is due: IndexError for an id out of range, StorageError for a page that
        cannot be read (the next minibatch is unaffected), MemoryBudgetError if it does not fit in memory, or
        if another loader of the same source has an open epoch.
        """
        return self.attach_epoch(
            EpochInput(
                minibatches=minibatches,
                ids_of=ids_of,
                learned=self._learned,
                bytes_of=bytes_of or (lambda _: 0),
                count=count,
            )
        )

    def attach_epoch(self, epoch: EpochInput[T]) -> EpochStream[T]:
        """attach() for an epoch of a loader that knows more of it."""
        if epoch.count is not None and epoch.count < 0:
            raise ValueError(f"count={epoch.count} must be 0 or more")
        epoch = replace(
            epoch, ids_of=Failed.or_else(epoch.ids_of, {}), bytes_of=Failed.or_else(epoch.bytes_of, 0)
        )
        minibatches = epoch.minibatches
        stream = EpochStream(
            minibatches if isinstance(minibatches, Sampled) else Sampled(minibatches),
            self._through(epoch),
            epoch.ids_of,
            count=epoch.count,
            begin=partial(self._begin, epoch),
            aside=partial(self._through, epoch),
            check=self.check_device,
            on_turn=partial(self.take_turn, epoch.learned),
            turn=partial(_turn_of, weakref.ref(self), epoch.learned),
            ended=epoch.learned.ended,
            seconds=self._seconds,
        )
        with self._lock:  # another thread may iterate over them, or close this one
            if self._ends:
                raise ValueError("this FeatureLoader is closed: make a new one")
            self._streams.add(stream)
        return stream

    @property
    def _lock(self) -> OwnLock:
        return self.source.lender.lock

    def _through(self, epoch: EpochInput[Any]) -> ThroughReader:
        return ThroughReader(partial(self._cache_for, epoch))

    def _begin(self, epoch: EpochInput[T], stream: EpochStream[T]) -> None:
        """Give a stream the window, if no other stream needs it. Called before each minibatch without it."""
        while True:
            closed = self._end_dropped()
            with self._lock:
                windowed = self._windowed
                other = None if windowed is None else windowed[0]()
                if closed and windowed is not None and other is None:  # it was dropped since then
                    continue
                gets_window = other is None or (stream.fresh and other.set_aside())
                self.take_turn(epoch.learned)  # what is dropped below was prepared for this loader
                if gets_window:
                    self._give_window(epoch, stream)
                elif not stream.warned:
                    stream.warned = True
                    mine = self._open_learned() is epoch.learned
                    log.warning(
                        "another iterator of %s is open, so this one reads through the cache without "
                        "lookahead: end the loop of the other, or close() it",
                        "this loader" if mine else "another loader of this source",
                    )
                    epoch.learned.drop_next()  # it may have begun to sample these minibatches
                return

    def _give_window(self, epoch: EpochInput[T], stream: EpochStream[T]) -> None:
        self._open_learned = weakref.ref(epoch.learned)
        if stream.fresh:
            self._placement.adapt_planned()
            self._choose_reads(epoch, stream)
        else:
            self._packs.release()
        self._placement.allow_waiting(epoch.waiting_batches)
        own = weakref.ref(stream)
        ended = partial(_stream_ended, weakref.ref(self), own, self.stats(), time.perf_counter())
        stream.take_window(self.cache_reader(epoch), ended)
        self._windowed = own, stream.ending

    def _choose_reads(self, epoch: EpochInput[T], stream: EpochStream[T]) -> None:
        """Let a stream read by packs where that is faster, if it may."""
        packs = self._packs
        prepared = packs.prepared(epoch.learned, epoch.minibatches)
        if self.may_use_packs(epoch.learned, epoch.count):
            source = stream.source if prepared is None else prepared.source
            switch = PackSwitch(
                source,
                epoch,
                self,
                packs,
                seconds=self._seconds,
                prepared=prepared,
            )
            stream.use(source, switch)
        else:
            if prepared is not None:
                prepared.close()
            packs.release()  # the memory is the cache's now

    def cache_reader(self, epoch: EpochInput[Any]) -> CacheReader:
        """A reader with lookahead, by random reads."""
        placement = self._placement
        return CacheReader(partial(self._cache_for, epoch), lambda: placement.window, placement.planned_now)

    def _end_dropped(self) -> bool:
        """Close the stream that had the window and was dropped or closed, where Ctrl-C interrupted that. Wait
        for another thread that does it.

        False if that takes too long, or if a forked child has no such thread.
        """
        while (windowed := self._windowed) is not None:  # another thread may change it
            stream, ending = windowed[0](), windowed[1]
            if stream is not None and not stream.closed:
                break
            if not ending.here:
                return False
            if stream is not None:
                stream.close()
            if not ending.finish(_DROPPED_S):
                return False
            with self._lock:
                if self._windowed is windowed:  # a signal handler closed it while it got the window
                    self._windowed = None
        return True

    def stats(self) -> dict[str, Any]:
        """Counters since construction, of all loaders that share this one. After close(), as they were then.

        In pages: ``hits``, ``misses``, ``coalesced`` (hits whose page was still being read), ``loads``,
        ``bypasses`` (misses that won no line), ``evictions``, ``failures``; ``hit_ratio``. Of the disk:
        ``pages_read``, ``bytes_read``, ``requests``. ``seconds`` by stage: ``sample``, ``plan``, ``wait``,
        ``gather``, and ``read`` (requests in flight, overlaps the others). ``memory``: bytes by purpose.
        ``packs``: counters of packs (``superbatches``, ``packs``, ``minibatches``, ``bytes_read``,
        ``bytes_written``, ``seconds``); ``choices``: of each run of minibatches the way of reading, with
        predicted and actual seconds; ``scratch``: directories, once known. ``window``, ``planned`` (in use),
        ``policy``; ``heat``: the method of each table, or None; ``engine``: its own counters; ``tables``: the
        counters of each table.
        """
        with self._lock:  # another thread may free the cache
            return self._last_stats or self._totals()

    def stats_of(self, learned: Learned) -> dict[str, Any]:
        """stats() of the epochs that were attached with this."""
        with self._lock:
            totals = self.stats()
            own = added(self._shares.get(learned, {}), between(totals, totals))
            whose, since = self._turn
            if whose() is learned:
                own = added(own, between(since, totals))
        own["packs"]["choices"] = [
            dict(vars(choice)) for choice in learned.choices
        ]  # one may last several turns
        return own

    def _totals(self) -> dict[str, Any]:
        packs = self._packs.stats()
        tables = self._placement.table_stats()
        io = self._engine.stats()

        def total(key: str) -> Any:
            return sum(t[key] for t in tables.values())

        counters = ("pages", "hits", "misses", "coalesced", "loads", "bypasses", "evictions", "failures")
        result: dict[str, Any] = {key: total(key) for key in counters}
        result["hit_ratio"] = result["hits"] / result["pages"] if result["pages"] else 0.0
        result["pages_read"] = io["reads"]
        result["bytes_read"] = io["bytes_read"] + packs["bytes_read"]
        result["requests"] = io["requests"]
        result["seconds"] = {
            "sample": self._seconds["sample"],
            "plan": total("enter_s") + total("plan_s") + total("retire_s") + packs["seconds"]["cut"],
            "wait": total("wait_s") + packs["seconds"]["sweep"] + packs["seconds"]["wait"],
            "gather": total("gather_s") + packs["seconds"]["gather"],
            "read": io["busy_s"],
        }
        result["memory"] = {"lines": 0} | (self._packs.memory() or self._placement.memory())
        # The plan of a machine has room for the next epoch.
        if self._packs.machine is None and (next_bytes := self._packs.next_bytes):
            result["memory"]["packs to come"] = next_bytes
        result["packs"] = packs
        result["window"] = self._placement.window
        result["planned"] = self._placement.planned
        result["policy"] = self._options.policy
        result["heat"] = dict(self._heat_methods)
        result["engine"] = {"name": self._engine.name, "note": self._engine.note, **io}
        result["tables"] = tables
        return result

    def cached_rows(self, table: str) -> torch.Tensor:
        """Rows of a table that the cache holds now: bool[row_count] on the CPU, for LocalityBias.

        Call it between epochs: while a stream is open, the result depends on the moment. On CUDA it counts
        lines in host memory, too, and blocks until all are read. All False before the first minibatch.
        Raises KeyError for a table that this loader does not load, ValueError after close().
        """
        loaded = next((t for t in self.tables if t.name == table), None)
        if loaded is None:
            known = ", ".join(repr(t.name) for t in self.tables)
            raise MissingError(f"no table {table!r} in this loader (it loads {known})")
        if not self._finalizer.alive:
            raise ValueError("this FeatureLoader is closed: its cache is gone")
        if self._cache is None:
            return torch.zeros(loaded.row_count, dtype=torch.bool)
        resident = self._cache.page_words(table) >> np.uint64(_core.STATE_SHIFT) == _core.RESIDENT
        return torch.from_numpy(loaded.rows_of_pages(resident))

    @property
    def line_bytes(self) -> int:
        """Bytes of the memory that holds the cache lines, of all tables together, at most."""
        budget, limit = self._placement.memory_bytes, self._options.cache
        return budget if limit is None else min(budget, limit)

    def keep_pages(self, table: str, pages: npt.NDArray[np.bool_]) -> None:
        """Never evict these pages of a table, bool[page_count]. Call it before the first minibatch.

        That holds for as many pages as half of the table's lines. A cache on a GPU evicts them all the same.
        """
        if isinstance(self._placement, HostPlacement) and self._cache is None:
            self._kept_pages[table] = pages
            self._placement.keep = True

    def table_heat(self, table: Table) -> npt.NDArray[np.uint8] | None:
        """uint8[page_count]: the heat that the policy knows of a table's pages; None without heat."""
        kept = self._kept_pages.get(table.name)
        if table.name in self._heats:
            heat, owners = self._heats[table.name]
            if self.store.part is not None and owners is not None and table.row_count < len(heat):
                heat = heat[owners == self.store.part.index]
            of_pages = page_heat(heat, table.rows_per_page, table.order)
        elif kept is not None:
            of_pages = np.zeros(table.page_count, np.uint8)
        else:
            return None
        if self._kept_pages:
            of_pages = np.minimum(of_pages, KEPT_HEAT - 1)
        if kept is not None:
            of_pages[kept] = KEPT_HEAT
        return of_pages

    def close(self) -> None:
        """End the open stream, let reads finish, close the files, free the cache. Idempotent."""
        with self._lock:
            self._ends = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        if self._finalizer.alive:
            self._packs.drop_next(self.take_turn)
            self._last_stats = self.stats()
            self.source.lender.count(self._last_stats)
            self._finalizer()
            self._packs.close()
            self._heats.clear()
            self._placement.cache = None

    def __repr__(self) -> str:
        tables = [t.name for t in self.tables]
        return f"FeatureLoader({self.store.name!r}, {tables}, {str(self.device)!r}, dtype={self.dtype})"

    def __getstate__(self) -> None:
        raise TypeError(
            "a FeatureLoader cannot be pickled: pass the FeatureStore and make a loader in each process"
        )

    def _cache_for(self, epoch: EpochInput[T], minibatch: T, ids: Ids, first: bool) -> Cache:
        """The cache. It is built at the first minibatch, for minibatches `growth` times as large."""
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError("this FeatureLoader is closed: make a new one")
            if self._packs.machine is not None:  # another stream's: packs have the memory of the cache
                self._placement.check_beside_packs(ids, self._packs.machine.output_rows)
                return cast(Cache, self._packs)
            return self._placement.cache_for(epoch, ids, epoch.bytes_of(minibatch), build=self._build)

    def may_use_packs(self, learned: Learned, count: int | None) -> bool:
        """Whether an epoch of so many minibatches that begins now considers packs. Raises ValueError if they
        are asked for and impossible.
        """
        reads = self._options.reads
        if reads == "random" or learned.random(count):
            return False
        wide = next((t for t in self.tables if t.row_count >= MOST_ROWS), None)
        if reads != "auto":
            if wide is not None:
                raise ValueError(f"reads={reads!r}: '{wide.name}' has 2^32 rows or more; use reads='random'")
            return True
        nbytes = sum(t.page_count * t.page_bytes for t in self.tables)
        memory = self.source.memory if self.device.type == "cpu" else self._placement.memory_bytes
        return wide is None and nbytes > memory and self._options.cache != 0

    def lines_for(self, epoch: EpochInput[Any], ids: Ids, minibatch_bytes: int) -> Mapping[str, int] | None:
        """Lines by table of the cache that minibatches like this one would get; None if they do not fit."""
        return self._placement.lines_for(epoch, ids, minibatch_bytes)

    def pack_bytes(self) -> int:
        """Borrow the memory of other loaders. Returns what packs may take once the cache is freed.

        Raises MemoryBudgetError if the open epoch of another loader has it.
        """
        with self._lock:
            return self.source.memory - self.source.lender.lend(self, host=True) - self._packs.next_bytes

    def free_cache(self, epoch: EpochInput[Any]) -> None:
        """Free the cache, for packs of this epoch."""
        with self._lock:
            self.release_cache()
            waiting = epoch.waiting_batches
            roomy = _WAITING_SHARE * epoch.source_bytes(waiting) <= self.pack_bytes()
            self._placement.waiting = waiting if roomy else 0

    def _build(self, sizes: Sizes) -> None:
        """Build the cache. sizes: of usual minibatches."""
        placement = self._placement
        heats = {t.name: heat for t in self.tables if (heat := self.table_heat(t)) is not None}
        kept_bytes = self.source.lender.lend(self)
        if placement.on_host:
            placement.leave_to_others(kept_bytes + self._packs.next_bytes)
        placement.build(sizes, heats)

    def take_turn(self, learned: Learned) -> None:
        """From now on count for the streams with this `learned`."""
        if self._turn[0]() is learned or self.closed:
            return
        with self._lock:
            totals = self.stats()
            before, since = self._turn[0](), self._turn[1]
            if before is not None:
                self._shares[before] = added(self._shares.get(before, {}), between(since, totals))
            self._turn = weakref.ref(learned), totals


def _choose_heat(store: FeatureStore, table: Table, heat: str) -> str | None:
    """The method of heat for a table, or None if it has no heat."""
    if not isinstance(table.type, str) or heat == "none" or not is_of_nodes(table, store):
        return None
    if heat == "auto":
        return next(iter(store.heat_methods(table.type)), None)
    store.heat(heat, table.type)  # KeyError: not stored, and how to compute it
    return heat


@contextmanager
def _turn_of(loader: weakref.ref[FeatureLoader], learned: Learned) -> Iterator[None]:
    """A context that counts for `learned`, and then again for whoever was counted for: the garbage collector
    may close a stream while another one reads. It may run anywhere, so this waits for no lock: where another
    thread has it, nothing is counted apart."""
    before = _turn_to(loader, learned)
    try:
        yield
    finally:
        if before is not None:
            _turn_to(loader, before, after=learned)


def _turn_to(
    loader: weakref.ref[FeatureLoader], learned: Learned, after: Learned | None = None
) -> Learned | None:
    """Count for `learned`, if `after` has the turn (None: anybody). Returns who had it; None if it stays."""
    me = loader()
    if me is None:
        return None
    lock, taken = me._lock, list[bool]()
    try:
        taken += map(lock.acquire, [False])
        before = me._turn[0]() if True in taken else None
        if True in taken and (after is None or before is after):
            me.take_turn(learned)
        return before
    finally:
        if True in taken:
            lock.release()


def _stream_ended(
    loader: weakref.ref[FeatureLoader],
    own: weakref.ref[EpochStream[Any]],
    before: dict[str, Any],
    begun: float,
) -> None:
    me = loader()
    if me is None:
        return
    windowed = me._windowed
    if windowed is None or windowed[0] is not own:
        return  # Ctrl-C interrupted this, and it is repeated; or another thread has begun the next epoch
    me._windowed = None
    if log.isEnabledFor(logging.INFO) and me._finalizer.alive:
        gathered = windowed[1].gathered
        line = epoch_summary(before, me._totals(), gathered, time.perf_counter() - begun)
        if line is not None:
            log.info(line)
