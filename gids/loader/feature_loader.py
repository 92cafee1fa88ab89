"""FeatureLoader: attaches features to a stream of sampled minibatches.

It composes store, I/O engine, cache and window. The other loaders and the adapters use it. It decides sizes
(memory, depth), and nothing per row.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from gids import _core, cuda
from gids.cache import page_heat
from gids.cache.budget import Sizes, available_bytes, longest_read_bytes, row_orders
from gids.cache.device.state import check_policy
from gids.cache.output_dtype import check_out_dtype
from gids.closing import Closing
from gids.errors import MemoryBudgetError, MissingError
from gids.io import Engine, open_engine, queue_depth
from gids.loader.counting import Stats, added, between, is_size
from gids.loader.epoch_stream import EpochStream, Failed, IdsOf, Sampled
from gids.loader.learned import Learned
from gids.loader.memory import (
    KEPT_HEAT,
    DevicePlacement,
    HostPlacement,
    Placement,
    Rows,
    check_minibatch_rows,
    larger,
    memory_line,
    page_bytes_read,
    rows_read,
    too_large,
    usual_sizes,
)
from gids.loader.observer import Observer, Observers, epoch_summary, stage_for
from gids.loader.options import MAX_PLANNED, explain_names
from gids.loader.pack_chooser import Alone, Together
from gids.loader.pack_reads import LEAST_BYTES, PackReads
from gids.loader.pack_switch import PackSwitch
from gids.loader.readers import Cache, CacheReader, Ids, ThroughReader
from gids.loader.source import Dataset, Source, as_source
from gids.loader.tables import Tables, chosen_tables, is_of_nodes
from gids.packs import MOST_ROWS, OnDevice, RowReader
from gids.sizes import format_bytes
from gids.store import FeatureStore, Table

T = TypeVar("T")
log = logging.getLogger("gids")

_ALONE = Alone()
_ADAPT_STEPS = 16
"""Minibatches after which the number of planned ones adapts again."""

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
        minibatch_rows: rows that the largest minibatch reads: of each table, or by table. Memory is shared
            out for such minibatches. Default: a quarter more than the first minibatch reads, or less where
            memory is short.
        observer: its methods are called as minibatches pass through the loader; see gids.loader.Observer.

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
        observer: Observer | None = None,
    ) -> None:
        self._opened = ExitStack()  # the cache ends before the engine that it reads by
        self.source = as_source(source, self._opened)
        self._options = options = self.source.options
        self.store = self.source.store
        if not tables:
            raise ValueError("tables is empty: give at least one name, such as 'paper.feat'")
        chosen = chosen_tables(self.source.stores, tables).values()
        self.tables: list[Table] = [t.opened(check_crc=options.check_crc) for t in chosen]
        self._minibatch_rows = check_minibatch_rows(minibatch_rows, [t.name for t in self.tables])
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
        depth = options.queue_depth or queue_depth(shards, options.engine)
        self._engine: Engine = open_engine(
            shards,
            kind=options.engine,
            depth=depth,
            threads=options.io_threads or 0,
            reads_per_s=options.reads_per_s or 0,
            direct=options.direct,
            max_read_bytes=longest_read_bytes(
                self.tables,
                memory_bytes=options.memory if on_cpu else None,
                queue_depth=depth,
            ),
        )
        self._opened.callback(self._engine.close)
        self._cache_end = self._opened.enter_context(ExitStack())
        self._finalizer = weakref.finalize(self, self._opened.close)
        self._placement: Placement = self._on_host() if on_cpu else self._on_device()
        self._packs_on: OnDevice | None = None
        if isinstance(self._placement, DevicePlacement) and options.reads != "random":
            self._packs_on = OnDevice(self._placement.device, self._placement.memory_bytes)
        self._learned = self._open_learned = Learned()
        self._packs = PackReads(
            self.tables, options, dtype, self._engine.bounce_bytes, self.source.lender, self._packs_on
        )
        self._seen: Rows = {}  # the most that a minibatch read so far
        self._checked: Rows = {}  # of a minibatch for which there was room
        self._minibatch_bytes = 0  # of the sampled minibatch itself: the largest so far
        self._warned_of_size = False
        self._cache: Cache | None = None
        self._counted: dict[str, dict[str, Any]] = {}  # by caches that were released
        self._forget_plan()
        self._given_waiting = 0  # to attach()
        self._lock = self.source.lender.lock
        self._windowed: weakref.ref[EpochStream[Any]] | None = None
        self._windowed_pid = 0
        self._streams: weakref.WeakSet[EpochStream[Any]] = weakref.WeakSet()  # the open ones, perhaps others
        self._seconds = {"sample": 0.0}
        self._observers = Observers(observer, stage_for(self.device))
        self._adapted_to = (0, 0)  # steps and misses, when the number of planned minibatches adapted last
        self._last_stats: dict[str, Any] | None = None  # once closed
        self._shares: weakref.WeakKeyDictionary[Learned, Stats] = weakref.WeakKeyDictionary()
        self._turn: tuple[Learned, Stats] | None = None  # whose streams read now, and stats() as that began
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """The loaders that share this one: see Source.feature_loader."""
        self.source.lender.join(self)

    @property
    def feature_loader(self) -> FeatureLoader:
        """This loader. See RowLoader."""
        return self

    def _on_host(self) -> HostPlacement:
        memory_bytes = self.source.memory
        return HostPlacement(
            self._engine, self.tables, self._options, memory_bytes=memory_bytes, dtype=self.dtype
        )

    def _on_device(self) -> DevicePlacement:
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
        return DevicePlacement(
            device, self._engine, self.tables, options, memory_bytes=memory_bytes, dtype=self.dtype
        )

    def check_device(self) -> None:
        """Raise RuntimeError while a CUDA graph is captured: no minibatch can be taken then."""
        if self.cuda_device is not None:
            self.cuda_device.check_not_capturing()

    @property
    def cuda_device(self) -> cuda.Device | None:
        """The device of the cache; None if it is in host memory."""
        return self._placement.device if isinstance(self._placement, DevicePlacement) else None

    def _forget_plan(self) -> None:
        """Use the window and the planned minibatches that the user wants, until memory is shared out."""
        options = self._options
        most = min(MAX_PLANNED, _core.USE_BITS - options.window)
        self._window = options.window
        self._most_planned = options.planned or most  # lowered to what memory allows, once that is known
        self._planned = options.planned or min(self._placement.least_planned, most)
        self._adapt_at = 0  # a step of the cache
        self._waiting = 0  # minibatches that are sampled, and not in the window yet
        self._most_waiting: int | None = None  # once memory is shared out

    @property
    def window(self) -> int:
        """Number of minibatches sampled ahead: as given; after the first minibatch, as memory allows."""
        return self._window

    @property
    def waiting_batches(self) -> int:
        """Minibatches that the source of attach() may hold: as given there, then as memory allows."""
        return self._waiting

    @property
    def held_bytes(self) -> int:
        """Memory of the sampled minibatches that are held at once.

        In stats()["memory"] they are "minibatches", or part of "window".
        """
        packs = self._packs.memory()
        if packs:
            return packs["minibatches"]
        return (self._window + self._planned + self._waiting) * self._minibatch_bytes

    @property
    def engine(self) -> Engine:
        """The I/O engine, for its counters. The loader closes it."""
        return self._engine

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call the methods of observer while a block runs."""
        return self._observers.added(observer)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def memories(self) -> frozenset[str]:
        """The memories that the cache takes: "host", "cuda:INDEX", or both."""
        packs = self._packs_on is not None and (
            self._options.reads == "pack" or self._packs.machine is not None
        )
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

    def release_cache(self) -> None:
        """Free the cache, between two epochs. The next minibatch makes a new one; counters go on."""
        self._packs.release()
        if self._cache is not None:
            self._counted = self._table_stats()
            self._cache = None
            self._cache_end.close()
            self._forget_plan()

    def expect_rows(self, minibatch_rows: int | Mapping[str, int]) -> None:
        """Leave room for minibatches of this number of rows, from the next epoch on. See minibatch_rows."""
        rows = check_minibatch_rows(minibatch_rows, [t.name for t in self.tables])
        assert rows is not None
        known = self._minibatch_rows or {}
        wanted = {name: max(count, known.get(name, 0)) for name, count in rows.items()}
        if wanted != known:
            self._minibatch_rows = wanted
            if not self.has_open_epoch:
                self.release_cache()

    def leave(self, user: object) -> None:
        """Called by a loader that shares this one, when it is closed. The last one closes this."""
        self.users.discard(user)
        if not self.users:
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

        Memory is shared out at the first minibatch. If a larger minibatch comes, fewer are planned ahead. If
        that is not enough to stay within the memory, one warning is logged, which names minibatch_rows.

        One stream at a time has the window: the one that began last. A stream begins with its first
        minibatch. One that began before goes on without lookahead, until the other one ends. While a stream
        reads by packs, it keeps the window. A stream ends with its last minibatch, by close(), or when it is
        dropped.

        Raises, when the minibatch is due: IndexError for an id out of range, StorageError for a page that
        cannot be read (the next minibatch is unaffected), MemoryBudgetError if it does not fit in memory, or
        if another loader of the same source has an open epoch.
        """
        return self.attach_epoch(minibatches, ids_of, bytes_of=bytes_of, count=count)

    def attach_epoch(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        *,
        bytes_of: Callable[[T], int] | None = None,
        waiting_batches: int = 0,
        source_bytes: Callable[[int], int] = lambda _waiting: 0,
        growth: float = 1.0,
        count: int | None = None,
        together: Together | None = _ALONE,
        learned: Learned | None = None,
        following: Callable[[], Iterable[T] | None] | None = None,
    ) -> EpochStream[T]:
        """attach() for an epoch of a loader that knows more of it.

        Args:
            waiting_batches: the most sampled minibatches that `minibatches` itself holds; they count with
                these bytes. After the first minibatch the property of that name limits them.
            source_bytes: returns other memory of `minibatches`, for the number of minibatches that it holds.
            growth: size of the other minibatches, relative to the first.
            together: what processes that sample together decide about packs. None: no packs.
            learned: what earlier epochs of the same user taught; the loader's own by default.
            following: returns the minibatches of the next epoch, or None. Called from the second epoch on, if
                packs can be made for them while this one is trained. This is called with the same object
                then; if it gets others, that work is thrown away.
        """
        if not self._finalizer.alive:
            raise ValueError("this FeatureLoader is closed: make a new one")
        if count is not None and count < 0:
            raise ValueError(f"count={count} must be 0 or more")

        attached = Attached(
            self,
            minibatches,
            Failed.or_else(ids_of, {}),
            Failed.or_else(bytes_of or (lambda _: 0), 0),
            waiting_batches=waiting_batches,
            source_bytes=source_bytes,
            growth=growth,
            count=count,
            together=together,
            learned=self._learned if learned is None else learned,
            following=following,
        )
        stream = attached.stream()
        self._streams.add(stream)
        return stream

    def _wait_for_dropped(self) -> None:
        """Wait until the stream that had the window, and was dropped in another thread, is closed there."""
        end = time.monotonic() + _DROPPED_S
        while self._windowed is not None and self._windowed() is None and time.monotonic() < end:
            if self._windowed_pid != os.getpid():  # a forked child has no such thread
                return
            time.sleep(0.0005)

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
        return self._last_stats or self._totals()

    def stats_of(self, learned: Learned) -> dict[str, Any]:
        """stats() of the epochs that were attached with this."""
        with self._lock:
            totals = self.stats()
            own = added(self._shares.get(learned, {}), between(totals, totals))
            if self._turn is not None and self._turn[0] is learned:
                own = added(own, between(self._turn[1], totals))
        own["packs"]["choices"] = [dict(choice) for choice in learned.choices]  # one may last several turns
        return own

    def _totals(self) -> dict[str, Any]:
        packs = self._packs.stats()
        tables = self._table_stats()
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
        result["memory"] = self._packs.memory() or self._placement.memory(self._cache, self.held_bytes)
        beside_bytes = self._packs.beside_bytes
        if self._packs.machine is None:  # whose plan has room for the next epoch
            beside_bytes += self._packs.next_bytes
        if beside_bytes:
            result["memory"]["packs to come"] = beside_bytes
        result["packs"] = packs
        result["window"] = self._window
        result["planned"] = self._planned
        result["policy"] = self._options.policy
        result["heat"] = dict(self._heat_methods)
        result["engine"] = {"name": self._engine.name, "note": self._engine.note, **io}
        result["tables"] = tables
        return result

    def _table_stats(self) -> dict[str, dict[str, Any]]:
        """Counters of each table, including released caches. Sizes are of the present cache."""
        present = self._cache.stats() if self._cache is not None else {}
        return {
            name: {
                key: present.get(name, {}).get(key, 0) + (0 if is_size(key) else before.get(key, 0))
                for key in (present.get(name) or before)
            }
            for name in (present or self._counted)
            for before in [self._counted.get(name, {})]
        }

    def cached_rows(self, table: str) -> torch.Tensor:
        """Rows of a table that the cache holds now: bool[row_count] on the CPU, for LocalityBias.

        Call it between epochs: while a stream is open, the result depends on the moment. On CUDA it counts
        the lines on the device, and blocks until they are read. All False before the first minibatch.
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
            if self.store.part is not None and owners is not None:
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
        for stream in list(self._streams):
            stream.close()
        if self._finalizer.alive:
            self._last_stats = self.stats()
            self.source.lender.count(self._last_stats)
            self._finalizer()
            self._packs.close()
            self._heats.clear()
            self._cache = None

    def __repr__(self) -> str:
        return f"FeatureLoader({self.store.name!r}, {[t.name for t in self.tables]}, {str(self.device)!r})"

    def __getstate__(self) -> None:
        raise TypeError(
            "a FeatureLoader cannot be pickled: pass the FeatureStore and make a loader in each process"
        )

    def _cache_for(
        self,
        attached: Attached[Any],
        ids: Ids,
        minibatch_bytes: int,
        first: bool,
    ) -> Cache:
        """The cache. It is built at the first minibatch, for minibatches `growth` times as large."""
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError("this FeatureLoader is closed: make a new one")
            if self._packs.machine is not None:  # another stream's: packs have the memory of the cache
                first_files = dict(zip((t.name for t in self.tables), self._first_files(), strict=True))
                return cast(Cache, RowReader(self._packs.machine, self._engine, first_files))
            rows = rows_read(ids, [t.name for t in self.tables])
            if self.device.type == "cpu":  # on a device the cache copies the ids
                minibatch_bytes = max(minibatch_bytes, sum(8 * n for n in rows.values()))
            largest_bytes = max(self._minibatch_bytes, minibatch_bytes)
            grew = largest_bytes > self._minibatch_bytes or any(
                n > self._checked.get(name, -1) for name, n in rows.items()
            )
            if self._cache is not None and (first or grew):
                self._checked = rows
                sizes = self._sizes(attached, rows, largest_bytes)
                if first and self._too_small(sizes, attached):
                    self.release_cache()
                    self._waiting = self._given_waiting
                else:
                    self._keep_within_memory(sizes, attached)
            if self._cache is None:
                sizes = self._sizes(attached, rows, minibatch_bytes, ids)
                try:
                    self._build(self._usual(sizes, attached))
                except MemoryBudgetError:
                    if not self._seen:
                        raise
                    # No cache has room for the largest one, which was warned of.
                    self._build(self._usual(sizes, attached, seen={}))
            assert self._cache is not None
            # Not before: a minibatch that does not fit does not count.
            self._seen, self._minibatch_bytes = larger(rows, self._seen), largest_bytes
            return self._cache

    def _first_files(self) -> list[int]:
        """The engine's number of each table's first shard."""
        return [0, *itertools.accumulate(len(t.shard_paths) for t in self.tables)][:-1]

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
        large = nbytes > max(memory, LEAST_BYTES)
        return wide is None and large and not self._observers.of_cache and self._options.cache != 0

    def _lines_for(self, attached: Attached[Any], ids: Ids, minibatch_bytes: int) -> Mapping[str, int] | None:
        """Lines by table of the cache that minibatches like this one would get; None if they do not fit."""
        rows = rows_read(ids, [t.name for t in self.tables])
        minibatch_bytes = max(minibatch_bytes, sum(8 * n for n in rows.values()))
        sizes = self._sizes(attached, rows, minibatch_bytes, ids)
        try:
            plan = self._placement.share(self._usual(sizes, attached), self._placement.memory_bytes)
        except MemoryBudgetError:
            return None
        return {name: count + plan.host_lines.get(name, 0) for name, count in plan.lines.items()}

    def _pack_bytes(self) -> int:
        """Borrow the memory of other loaders. Returns the bytes for packs.

        On a device 0, if the open epoch of another loader has the host memory, which the cache does not need.
        """
        with self._lock:
            try:
                kept_bytes = self.source.lender.lend(self, host=True)
            except MemoryBudgetError as error:
                if self.device.type == "cpu" or self._options.reads != "auto":
                    raise
                log.info("no memory for packs: %s", error)
                return 0
            return self.source.memory - kept_bytes - self._packs.next_bytes

    def _free_cache(self, attached: Attached[Any]) -> None:
        with self._lock:
            self.release_cache()
            roomy = _WAITING_SHARE * attached.source_bytes(self._given_waiting) <= self._pack_bytes()
            self._waiting = self._given_waiting if roomy else 0

    def _build(self, sizes: Sizes) -> None:
        """sizes: of usual minibatches."""
        heats = {t.name: heat for t in self.tables if (heat := self.table_heat(t)) is not None}
        kept_bytes = self.source.lender.lend(self)
        if self.device.type == "cpu":
            self._placement.memory_bytes = self.source.memory - kept_bytes - self._packs.next_bytes
        first = self._placement.plan is None
        self._cache, plan = self._placement.build(sizes, heats)
        wanted, available = sum(plan.purposes.values()), available_bytes()
        if first and self.device.type == "cpu" and wanted > available:
            log.warning(
                "the loader is going to use %s of memory, and %s are available: give a smaller memory=",
                format_bytes(wanted),
                format_bytes(available),
            )
        self._cache_end.callback(self._cache.close)
        self._window = plan.sizes.window_batches
        self._most_planned = plan.sizes.planned_batches
        self._planned = min(self._planned, self._most_planned)
        self._waiting = self._most_waiting = plan.sizes.waiting_batches
        if log.isEnabledFor(logging.INFO):
            log.info(memory_line(self.tables, self._placement, sizes, plan))
        self._observers.cache_opened(self._cache)

    def _sizes(
        self, attached: Attached[Any], rows: Rows, minibatch_bytes: int, ids: Ids | None = None
    ) -> Sizes:
        """Of a minibatch. ids: its own, if the bytes of its pages matter."""
        return Sizes(
            rows=rows,
            page_bytes=0 if ids is None else page_bytes_read(ids, self.tables),
            minibatch_bytes=minibatch_bytes,
            window_batches=self._window,
            planned_batches=self._planned,
            most_planned_batches=self._most_planned,
            least_planned_batches=self._options.planned or 1,
            waiting_batches=self._waiting,
            source_bytes=attached.source_bytes,
        )

    def _usual(self, sizes: Sizes, attached: Attached[Any], *, seen: Rows | None = None) -> Sizes:
        """Of usual minibatches, given one. seen: rows to expect in place of those of minibatches so far."""
        largest_bytes, seen = (self._minibatch_bytes, self._seen) if seen is None else (0, seen)
        usual = usual_sizes(sizes, largest=self._minibatch_rows, growth=attached.growth, seen=seen)
        return replace(usual, minibatch_bytes=max(usual.minibatch_bytes, largest_bytes))

    def _too_small(self, sizes: Sizes, attached: Attached[Any]) -> bool:
        """Whether the cache has no room for minibatches as large as those before, or as the user expects, and
        another one would have.

        sizes: of the first minibatch of an epoch.
        """
        rows = larger(larger(sizes.rows, self._seen), self._minibatch_rows or {})
        return self._placement.excess_bytes(replace(sizes, rows=rows)) > 0 and self._fits(sizes, attached)

    def _fits(self, sizes: Sizes, attached: Attached[Any]) -> bool:
        """Whether a cache can leave room for minibatches of these sizes, and for those before."""
        try:
            self._placement.share(self._usual(sizes, attached), self._placement.memory_bytes)
        except MemoryBudgetError:
            return False
        return True

    def _keep_within_memory(self, sizes: Sizes, attached: Attached[Any]) -> None:
        """Plan fewer minibatches at once from now on if these sizes need it. Warn if that is not enough."""

        def excess_bytes(planned: int) -> int:
            return self._placement.excess_bytes(sizes.with_planned(planned))

        least = self._options.planned or self._placement.least_planned
        while self._most_planned > least and excess_bytes(self._most_planned) > 0:
            self._most_planned -= 1
        self._planned = min(self._planned, self._most_planned)
        if not self._warned_of_size and (excess := excess_bytes(self._planned)) > 0:
            self._warned_of_size = True
            log.warning(too_large(sizes.rows, excess, in_time=self._fits(sizes, attached)))

    def _planned_now(self) -> int:
        """Minibatches to plan ahead. On the CPU they adapt within an epoch too, by counts that repeat."""
        if self.device.type == "cpu" and self._cache is not None and self._cache.next_step >= self._adapt_at:
            self._adapt_planned()
        return self._planned

    def _adapt_planned(self) -> None:
        """Plan the fewest minibatches whose missing pages cover twice the queue, as in the last ones."""
        if self._options.planned is not None or self._cache is None:
            return
        tables = self._table_stats().values()
        steps = max(t["steps"] for t in tables)
        misses = sum(t["misses"] for t in tables)
        new_steps, new_misses = steps - self._adapted_to[0], misses - self._adapted_to[1]
        self._adapted_to = (steps, misses)
        self._adapt_at = self._cache.next_step + _ADAPT_STEPS
        if new_steps == 0:
            return
        wanted = math.ceil(2 * self._engine.depth * new_steps / max(1, new_misses))
        self._planned = min(max(self._placement.least_planned, wanted), self._most_planned)


class Attached(Generic[T]):
    """What attach() was called with, and what its stream and packs ask of the loader.

    It does not refer to the stream, which is to end when it is dropped.
    """

    def __init__(
        self,
        loader: FeatureLoader,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        bytes_of: Callable[[T], int],
        *,
        waiting_batches: int,
        source_bytes: Callable[[int], int],
        growth: float,
        count: int | None,
        together: Together | None,
        learned: Learned,
        following: Callable[[], Iterable[T] | None] | None,
    ) -> None:
        self._loader, self._minibatches, self._ids_of, self.bytes_of = loader, minibatches, ids_of, bytes_of
        self._source = minibatches if isinstance(minibatches, Sampled) else Sampled(minibatches)
        self._waiting_batches, self.source_bytes, self.growth = waiting_batches, source_bytes, growth
        self.count, self.learned, self._following = count, learned, following
        self._alone, self._packs_allowed = together is _ALONE, together is not None
        self.together: Together = _ALONE if together is None else together
        self._warned = False

    def stream(self) -> EpochStream[T]:
        return EpochStream(
            self._source,
            self._through(),
            self._ids_of,
            count=self.count if self._alone else None,  # together, a stream ends with its superbatch
            begin=self._begin,
            aside=self._through,
            on_turn=partial(_take_turn, weakref.ref(self._loader), self.learned),
            check=self._loader.check_device,
        )

    def reader(self) -> CacheReader:
        """A reader with lookahead, by random reads."""
        loader = self._loader
        return CacheReader(self._cache_for, lambda: loader._window, loader._planned_now)

    def lines_for(self, ids: Ids, minibatch_bytes: int) -> Mapping[str, int] | None:
        """Lines by table of the cache that minibatches like this one would get; None if they do not fit."""
        return self._loader._lines_for(self, ids, minibatch_bytes)

    def memory_bytes(self) -> int:
        """Borrow the memory of other loaders. Returns what packs may take once the cache is freed."""
        return self._loader._pack_bytes()

    def free_cache(self) -> None:
        self._loader._free_cache(self)

    @property
    def sampler_bytes(self) -> int:
        """Memory of the sampler."""
        return self.source_bytes(self.waiting)

    @property
    def waiting(self) -> int:
        """Sampled minibatches that the source holds."""
        return self._loader._waiting

    def _cache_for(self, minibatch: T, ids: Ids, first: bool) -> Cache:
        return self._loader._cache_for(self, ids, self.bytes_of(minibatch), first)

    def _through(self) -> ThroughReader:
        return ThroughReader(self._cache_for)

    def _begin(self, stream: EpochStream[T]) -> None:
        """Take the window, if no other stream needs it. Called before each minibatch without it."""
        loader = self._loader
        loader._wait_for_dropped()
        with loader._lock:
            other = None if loader._windowed is None else loader._windowed()
            if other is None or (stream.fresh and other.set_aside()):
                self._take_window(stream)
            elif not self._warned:
                self._warned = True
                mine = loader._open_learned is self.learned
                log.warning(
                    "another iterator of %s is open, so this one reads through the cache without "
                    "lookahead: end the loop of the other, or close() it",
                    "this loader" if mine else "another loader of this source",
                )
                self.learned.drop_next()  # it may have begun to sample these minibatches

    def _take_window(self, stream: EpochStream[T]) -> None:
        loader = self._loader
        loader._open_learned = self.learned
        if stream.fresh:
            loader._adapt_planned()
            self._choose_reads(stream)
        else:
            loader._packs.release()
        loader._waiting = loader._given_waiting = self._waiting_batches
        if loader._most_waiting is not None:
            loader._waiting = min(self._waiting_batches, loader._most_waiting)
        own = weakref.ref(stream)
        ended = partial(_stream_ended, weakref.ref(loader), own, loader.stats(), time.perf_counter())
        stream.take_window(self.reader(), loader._observers, ended)
        loader._windowed, loader._windowed_pid = own, os.getpid()

    def _choose_reads(self, stream: EpochStream[T]) -> None:
        """Let the stream read by packs where that is faster, if it may."""
        loader, sampled, switch = self._loader, self._source, None
        packs, on_device = loader._packs, loader._packs_on
        prepared = packs.prepared(self.learned, self._minibatches)
        if self._packs_allowed and loader.may_use_packs(self.learned, self.count):
            if prepared is not None:
                sampled = prepared.source
            ids_of = self._ids_of if on_device is None else on_device.ids_of(self._ids_of)
            following = (
                self._following if self._alone and on_device is None and self.learned.longest else None
            )
            switch = PackSwitch(
                sampled,
                ids_of,
                packs,
                self,
                seconds=loader._seconds,
                observers=loader._observers,
                prepared=prepared,
                following=following,
            )
        else:
            if prepared is not None:
                prepared.close()
            packs.release()  # the memory is the cache's now
        stream.use(sampled, self._ids_of, switch, loader._seconds, self.learned.ended)


def _choose_heat(store: FeatureStore, table: Table, heat: str) -> str | None:
    """The method of heat for a table, or None if it has no heat."""
    if not isinstance(table.type, str) or heat == "none" or not is_of_nodes(table, store):
        return None
    if heat == "auto":
        return next(iter(store.heat_methods(table.type)), None)
    store.heat(heat, table.type)  # KeyError: not stored, and how to compute it
    return heat


def _take_turn(loader: weakref.ref[FeatureLoader], learned: Learned) -> None:
    """From now on count for the streams with this `learned`."""
    me = loader()
    if me is None or (me._turn is not None and me._turn[0] is learned) or me.closed:
        return
    with me._lock:
        totals = me.stats()
        if me._turn is not None:
            before, since = me._turn
            me._shares[before] = added(me._shares.get(before, {}), between(since, totals))
        me._turn = learned, totals


def _stream_ended(
    loader: weakref.ref[FeatureLoader],
    own: weakref.ref[EpochStream[Any]],
    before: dict[str, Any],
    begun: float,
) -> None:
    me = loader()
    if me is None:
        return
    if me._windowed is own:  # another thread may have begun the next epoch, once this one was dropped
        me._windowed = None
    if log.isEnabledFor(logging.INFO) and me._finalizer.alive:
        line = epoch_summary(before, me.stats(), time.perf_counter() - begun)
        if line is not None:
            log.info(line)
