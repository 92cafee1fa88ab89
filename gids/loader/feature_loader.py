"""FeatureLoader: attaches features to a stream of sampled minibatches.

It composes store, I/O engine, cache and window, and decides which stream has the window, and from whom memory
is borrowed. The other loaders and the adapters use it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gids import _core, cuda
from gids.cache import page_heat
from gids.cache.budget import (
    OTHERS,
    Sizes,
    affordable_depth,
    longest_read_bytes,
    row_orders,
)
from gids.cache.device.state import check_policy
from gids.cache.output_dtype import check_out_dtype
from gids.closing import Closing
from gids.cuda.pinned import check_pinning
from gids.errors import MemoryBudgetError, MissingError
from gids.io import Engine, open_engine, queue_depth
from gids.io.speed import DiskSpeed, known_speed
from gids.loader.memory import (
    KEPT_HEAT,
    DevicePlacement,
    HostPlacement,
    Placement,
    Rows,
    check_minibatch_rows,
    larger,
)
from gids.loader.options import Size, explain_names
from gids.loader.packer import PackedRows, Packer, most_rows
from gids.loader.queue import Queue
from gids.loader.row_source import Tables, chosen_tables, is_of_nodes
from gids.loader.rows import Cache, CachedRows, EpochInput, IdsOf
from gids.loader.rows import Rows as EpochRows
from gids.loader.source import Dataset, Source, as_source
from gids.loader.stats import Stats, epoch_summary, no_packs
from gids.loader.stream import EpochStream
from gids.loader.superbatch import Packs, Reading
from gids.packs.device_runs import OnDevice
from gids.store import FeatureStore, Table

T = TypeVar("T")
log = logging.getLogger("gids")

_MEASURED_SHARE = 16
_MEASURED_BYTES = 32 << 20
"""What is read to measure the disks takes at most 1/16 of the memory, and at most so much."""


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
        pin_memory: with ``device="cpu"``, features are in pinned memory of torch's, so that ``.to("cuda",
            non_blocking=True)`` copies them while training goes on (default False).
        memory: with a path or a FeatureStore, as in gids.open().

    The memory is the source's. It is taken when an epoch begins, from idle loaders of the same source.

    Raises KeyError for a table, or a heat, that the store does not have, ValueError for a number out of its
    range, StorageError for shards that cannot be opened, ImportError and RuntimeError when device="cuda"
    finds no CuPy or no usable driver, PyTorch's RuntimeError for pin_memory=True without a driver.
    MemoryBudgetError (a ValueError) is raised at the first minibatch, which shows how much memory a minibatch
    needs; or at once if device_memory is more than is free.
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
        pin_memory: bool = False,
        memory: Size | None = None,
    ) -> None:
        self._opened = ExitStack()  # the cache ends before the engine that it reads by
        self.source = as_source(source, self._opened, memory=memory)
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
        check_pinning(pin_memory, self.device)
        self.dtype, self._pinned = dtype, bool(pin_memory)
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
            direct=options.direct,
            max_read_bytes=longest_read_bytes(self.tables, memory_bytes=budget, queue_depth=depth),
        )
        self._opened.callback(self._engine.close)
        self._finalizer = weakref.finalize(self, self._opened.close)
        speed = None if options.planned is not None else self._disk_speed(depth, budget)
        self._placement: Placement = (
            HostPlacement(
                self._engine,
                self.tables,
                options,
                self.source.memory,
                dtype,
                expected,
                speed,
                pinned=self._pinned,
            )
            if on_cpu
            else self._on_device(expected, speed)
        )
        self._opened.callback(self._placement.end.close)
        # Of the epoch that began last.
        self._windowed: Callable[[], CachedRows | PackedRows | None] = lambda: None
        self._packs: Packs | None = None  # once an epoch may read by them
        self._epoch_begun: tuple[float, Stats] | None = None  # for the line in the log at its end
        self._seconds = {"sample": 0.0}
        self._last_stats: dict[str, Any] | None = None  # once closed
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """The loaders that share this one: see Source.feature_loader."""
        self.source.lender.join(self)

    @property
    def feature_loader(self) -> FeatureLoader:
        """This loader. See RowLoader."""
        return self

    def _disk_speed(self, depth: int, memory_bytes: int) -> DiskSpeed:
        """Of random reads of pages of the largest table."""
        largest = max(self.tables, key=lambda t: t.page_count * t.page_bytes)
        return known_speed(
            largest.shards,
            largest.page_bytes,
            self._options.engine,
            depth=depth,
            direct=self._options.direct,
            most_bytes=min(_MEASURED_BYTES, memory_bytes // _MEASURED_SHARE),
        )

    def _on_device(self, expected: Rows | None, speed: DiskSpeed | None) -> DevicePlacement:
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
            device, self._engine, self.tables, options, memory_bytes, self.dtype, expected, speed
        )

    def check_open(self) -> None:
        """Raise ValueError after close()."""
        if self.closed:
            raise ValueError("this FeatureLoader is closed: make a new one")

    @property
    def check(self) -> Callable[[], None] | None:
        """Raises RuntimeError while a CUDA graph is captured: no minibatch can be taken then."""
        return None if self.cuda_device is None else self.cuda_device.check_not_capturing

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
        return self._placement.held_bytes

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
        return self._placement.memories

    @property
    def has_cache(self) -> bool:
        return self._cache is not None or self._reading is not None

    @property
    def has_open_epoch(self) -> bool:
        rows = self._windowed()
        return rows is not None and rows.has_window

    @property
    def kept_bytes(self) -> int:
        """Host memory that stays taken without a cache: the bounce pool, orders that were compared, and what
        preparing a next epoch takes."""
        if self.closed:
            return 0
        packs, preparing = self._packs, 0
        if packs is not None and packs.coming is not None:
            preparing = packs.preparing_bytes(packs.coming)
        return self._engine.bounce_bytes + sum(row_orders(self.tables).values()) + preparing

    @property
    def _cache(self) -> Cache | None:
        return self._placement.cache

    @property
    def _reading(self) -> Reading | None:
        """The superbatch that is read by packs."""
        return None if self._packs is None else self._packs.reading

    def release_cache(self) -> None:
        """Free the cache, between two epochs. The next minibatch makes a new one; counters go on."""
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
            minibatches: sampled in the consumer's thread, ahead by the window; by packs up to 2,048.
            ids_of: returns the rows that a minibatch reads: int64[n] for each table, on the CPU or on the
                loader's device, may repeat. Features are [n, *shape] of the table's dtype, in that order. The
                consumer owns them. On CUDA they are ready for the stream that is current when the minibatch
                is handed out.
            bytes_of: returns the memory of a sampled minibatch. It counts as part of the window, on CUDA as
                "minibatches", outside the budget.
            count: number of minibatches, if known: it helps to choose how they are read.

        Memory is divided once, at the first minibatch. A minibatch larger than it was divided for goes above
        it, with one warning, which names minibatch_rows.

        A stream begins with its first minibatch. It ends with its last minibatch, by close(), by an error, or
        when it is dropped. The one that began last has the window. One that was interrupted by it goes on
        without look-ahead, with a warning, and never gets the window back.

        Raises, when the minibatch is due: IndexError for an id out of range, StorageError for a page that
        cannot be read, MemoryBudgetError if it does not fit in memory, or if another loader of the same
        source has an open epoch. An error ends the epoch.
        """
        nbytes = bytes_of or (lambda _: 0)
        return self.attach_epoch(
            EpochInput(minibatches=minibatches, ids_of=ids_of, bytes_of=nbytes, count=count)
        )

    def attach_epoch(self, epoch: EpochInput[T]) -> EpochStream[T]:
        """attach() for an epoch of a loader that knows more of it."""
        if epoch.count is not None and epoch.count < 0:
            raise ValueError(f"count={epoch.count} must be 0 or more")
        self.check_open()
        random = CachedRows(
            epoch,
            self._placement,
            begin=partial(self._give_window, epoch.waiting_batches),
            build=self._build,
            ended=self._epoch_ended,
        )
        rows: EpochRows = random
        minibatches: Iterable[T] = epoch.minibatches
        if (packs := self._packs_for(epoch)) is not None:
            minibatches, coming = packs.ahead(epoch.minibatches)
            packer = Packer(packs, epoch, minibatches, coming)
            rows = PackedRows(
                random,
                packer,
                begun=self._set_windowed,
                release_cache=partial(self._release_for_packs, epoch),
            )
        queue = Queue(minibatches, epoch.count)
        pid, seconds = self.source.lender.pid, self._seconds
        return EpochStream(queue, rows, pid=pid, check=self.check, seconds=seconds)

    def _packs_for(self, epoch: EpochInput[Any]) -> Packs | None:
        """What an epoch needs to read by packs; None if it reads at random.

        Raises ValueError if packs are asked for and impossible.
        """
        options, memory, host = self._options, self._placement.memory_bytes, self.source.memory
        if options.reads == "random":
            return None
        long = next((t for t in self.tables if t.row_count > most_rows(host)), None)
        if options.reads == "pack" and long is not None:
            raise ValueError(
                f"reads='pack': {long.name!r} has {long.row_count:,} rows, and packs can be planned for "
                f"{most_rows(host):,} with memory={host}: give more memory, or use reads='random'"
            )
        nbytes = sum(t.page_count * t.page_bytes for t in self.tables)
        if options.reads == "auto" and (long is not None or nbytes <= memory or options.cache == 0):
            return None
        if self._packs is None:
            scratch = self.source.lender.scratch(options, [p for t in self.tables for p in t.shard_paths])
            if scratch is not None:
                on = None
                if (device := self.cuda_device) is not None:
                    on = OnDevice(device, memory, options.staging)
                self._packs = Packs(
                    self.tables,
                    options,
                    self.dtype,
                    self._engine,
                    scratch,
                    host,
                    self._seconds,
                    on,
                    pinned=self._pinned,
                )
        return self._packs

    def forget(self, minibatches: Iterable[Any]) -> None:
        """Drop what is prepared of a next epoch with these minibatches, if it is."""
        packs = self._packs
        if packs is not None and packs.coming is not None and packs.coming.ahead.minibatches is minibatches:
            packs.keep(None)

    def _release_for_packs(self, epoch: EpochInput[Any]) -> dict[str, int]:
        """Free the cache, and those of other loaders. Returns the memory that stays taken, by purpose."""
        self.release_cache()
        kept = {
            "bounce pool": self._engine.bounce_bytes,
            "sampler": epoch.source_bytes(epoch.waiting_batches),
            OTHERS: self.source.lender.lend(self),
        }
        return {name: nbytes for name, nbytes in (kept | row_orders(self.tables)).items() if nbytes}

    def _give_window(self, waiting_batches: int, rows: CachedRows) -> None:
        """Give the window to an epoch that begins. Another one goes on without it."""
        if (other := self._windowed()) is not None:
            other.lose_window()
        self._set_windowed(rows)
        self._placement.adapt_planned()
        self._placement.allow_waiting(waiting_batches)
        self._epoch_begun = (time.perf_counter(), self.stats()) if log.isEnabledFor(logging.INFO) else None

    def _set_windowed(self, rows: CachedRows | PackedRows) -> None:
        self._windowed = weakref.ref(rows)

    def _epoch_ended(self, rows: CachedRows) -> None:
        """Log what the epoch read, which had the window."""
        if self._epoch_begun is not None and not self.closed:
            since, before = self._epoch_begun
            seconds = time.perf_counter() - since
            if (line := epoch_summary(before, self.stats(), rows.gathered, seconds)) is not None:
                log.info(line)

    def stats(self) -> dict[str, Any]:
        """Counters of the cache since construction, which all loaders of the same tables, dtype and device of
        a source share. After close(), as they were then.

        In pages: ``hits``, ``misses``, ``coalesced`` (hits whose page was still being read), ``loads``,
        ``bypasses`` (misses that won no line), ``evictions``, ``failures``; ``hit_ratio``. Of the disk:
        ``pages_read``, ``bytes_read``, ``requests``. ``seconds`` by stage: ``sample``, ``plan``, ``wait``,
        ``gather``, and ``read`` (requests in flight, overlaps the others). ``memory``: bytes by purpose.
        ``packs``: ``superbatches`` (that were written), ``minibatches`` (that were read by packs),
        ``bytes_read``, ``bytes_written``; ``seconds`` of ``plan`` and ``sweep``, which may overlap training,
        ``wait`` and ``gather``; ``choices``: of each superbatch, and of minibatches at random, ``way``,
        ``minibatches``, ``predicted_s`` by way, ``returned`` (minibatches so far), ``actual_s`` (of waiting
        for the pass and for them); ``scratch``: directories, once known. ``window``, ``planned`` (in use),
        ``policy``; ``heat``: the method of each table, or None; ``engine``: its own counters; ``tables``: the
        counters of each table.
        """
        if self._last_stats is not None:
            return self._last_stats
        tables = self._placement.table_stats()
        io = self._engine.stats()

        def total(key: str) -> Any:
            return sum(t[key] for t in tables.values())

        counters = ("pages", "hits", "misses", "coalesced", "loads", "bypasses", "evictions", "failures")
        result: dict[str, Any] = {key: total(key) for key in counters}
        result["hit_ratio"] = result["hits"] / result["pages"] if result["pages"] else 0.0
        result["pages_read"] = io["reads"]
        packs, swept_bytes = no_packs(), 0
        if self._packs is not None:
            packs, swept_bytes = self._packs.stats(), self._packs.counted.swept_bytes
        result["bytes_read"] = io["bytes_read"] + packs["bytes_read"] - swept_bytes
        result["requests"] = io["requests"]
        result["seconds"] = {
            "sample": self._seconds["sample"],
            "plan": total("enter_s") + total("plan_s") + total("retire_s"),
            "wait": total("wait_s") + packs["seconds"]["wait"],
            "gather": total("gather_s") + packs["seconds"]["gather"],
            "read": io["busy_s"],
        }
        memory = self._placement.memory() if self._reading is None else self._reading.memory()
        result["memory"] = {"lines": 0} | memory
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
        """End the open epoch, let reads finish, close the files, free the cache. Idempotent."""
        if not self._finalizer.alive:
            return
        if (rows := self._windowed()) is not None:
            rows.close()
        if self._packs is not None:
            self._packs.close()
        self._last_stats = self.stats()
        self.source.lender.leave(self, self._last_stats)
        self._finalizer()
        self._heats.clear()
        self._placement.cache = None

    def __repr__(self) -> str:
        tables = [t.name for t in self.tables]
        return f"FeatureLoader({self.store.name!r}, {tables}, {str(self.device)!r}, dtype={self.dtype})"

    def __getstate__(self) -> None:
        raise TypeError(
            "a FeatureLoader cannot be pickled: pass the FeatureStore and make a loader in each process"
        )

    def _build(self, sizes: Sizes) -> None:
        """Build the cache. sizes: of usual minibatches."""
        self.check_open()
        if self._reading is not None:
            raise MemoryBudgetError(
                "another epoch of the same tables reads by packs, which have the memory: end that one first, "
                "or open a second source with its own memory, gids.open(PATH, memory=...)"
            )
        placement = self._placement
        heats = {t.name: heat for t in self.tables if (heat := self.table_heat(t)) is not None}
        kept_bytes = self.source.lender.lend(self)
        if placement.on_host:
            placement.leave_to_others(kept_bytes)
        placement.build(sizes, heats)


def _choose_heat(store: FeatureStore, table: Table, heat: str) -> str | None:
    """The method of heat for a table, or None if it has no heat."""
    if not isinstance(table.type, str) or heat == "none" or not is_of_nodes(table, store):
        return None
    if heat == "auto":
        return next(iter(store.heat_methods(table.type)), None)
    store.heat(heat, table.type)  # KeyError: not stored, and how to compute it
    return heat
