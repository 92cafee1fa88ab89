"""FeatureLoader: attaches features to a stream of sampled minibatches.

The composition of store, I/O engine, cache and window; the adapters for DGL and others are thin wrappers of
it. It decides sizes (memory, depth), and nothing per row.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache import POLICIES, page_heat
from gids.cache.budget import longest_read_bytes
from gids.cache.live_batches import Sizes
from gids.cache.output_dtype import check_out_dtype
from gids.errors import MissingError
from gids.io import QUEUE_DEPTH, Engine, open_engine
from gids.loader.memory_line import memory_line
from gids.loader.minibatch_sizes import (
    Rows,
    check_minibatch_rows,
    page_bytes_read,
    rows_read,
    too_large,
    usual_sizes,
)
from gids.loader.placement import DevicePlacement, HostPlacement, Placement
from gids.loader.stages import Stage, epoch_summary, stage_for
from gids.loader.stream import Cache, Ids, IdsOf, ReadThroughStream, WindowedStream
from gids.loader.tables import Tables, chosen_tables, is_of_nodes
from gids.store import FeatureStore, Table, open_store
from gids.store.names import HEAT_ROLES

T = TypeVar("T")
log = logging.getLogger("gids")

MAX_PLANNED = 8


class FeatureLoader:
    """Feature rows for sampled minibatches, read ahead through a cache.

    Args:
        store: the dataset, or its path.
        tables: the tables to load: names, such as ``"paper.feat"``, and tables of other stores, such as
            ``other.table("paper.text")``; or a mapping from the names that features go by to these.
        window_batches: minibatches sampled ahead, whose pages the cache keeps. 0 to 23. Fewer are, where
            their memory is better spent on cache lines: ``stats()["window_batches"]`` says how many.
        planned_batches: minibatches whose reads are in flight or done, before they are handed out. None
            starts with 2 and, between epochs, takes the least number whose missing pages cover twice the
            queue depth. ``window_batches + planned_batches`` is at most 24.
        memory_bytes: for everything: cache lines, outputs, bounce pool, window, page tables. None takes half
            of the memory available, divided by the number of ranks on this machine (on CUDA: half of the
            device's free memory). It must hold at least the page tables, the bounce pool and the features of
            two minibatches.
        minibatch_rows: rows that the largest minibatch reads: of each table, or by table. Memory is shared
            out for such minibatches. None takes a quarter more than the first one reads; less of that where
            memory is short.
        cache_bytes: at most so much of it for cache lines; 0 works, without a cache.
        policy: ``"lookahead"``, ``"window-pin"``, ``"random"``, ``"lru"`` or ``"static"``.
        heat: which stored heat of nodes the policy falls back on: ``"out-degree"`` (conversion stores it),
            ``"reverse-pagerank"`` or ``"sampled"`` (``gids heat`` does), or ``"none"``. ``"auto"`` takes, for
            each table, the first that is there of reverse-pagerank, sampled, out-degree. It is that of the
            store's nodes; tables of edges, and of other nodes, have none.
        engine: ``"auto"``, ``"uring"``, ``"threads"`` or ``"mmap"``.
        queue_depth: requests in flight at the device.
        threads: that copy rows. None takes torch's number.
        check_crc: compare every page read with its checksum.
        direct: read past the page cache (O_DIRECT).
        dtype: of the features, where it is not the stored one: float32, float16 or bfloat16, for
            tables of one of these; they are converted while they are gathered. Tables stored as int8 with a
            scale are float32 unless this says otherwise.
        device: ``"cpu"`` or ``"cuda"``. On CUDA cache and features are in device memory, GPU threads ask for
            the missing pages themselves, and ids may be tensors of that device or of the CPU. memory_bytes
            and cache_bytes are then device memory, memory_bytes=None is half of what is free, and the
            policy is not ``"lru"``.
        host_cache_bytes: on CUDA, host memory for a tier of pinned lines under those on the device.
        host_policy: ``"lookahead"``: its lines are replaced as those on the device are; ``"static"``: it
            keeps the hottest pages that the device's lines do not.
        wait: on CUDA, how kernels wait for pages: ``"stream"`` (the stream waits, no kernel spins) or
            ``"warp"`` (warps poll, as in BaM).
        staging_bytes: on CUDA, pinned host memory through which pages travel.

    Raises KeyError for a table, or a heat, that the store does not have, ValueError for a number out of its
    range, StorageError for shards that cannot be opened, ImportError and RuntimeError when device="cuda"
    finds no CuPy or no usable driver. MemoryBudgetError (a ValueError) comes with the first minibatch, which
    shows how much memory one needs; at once when more device memory is asked for than is free.
    """

    def __init__(
        self,
        store: FeatureStore | str | os.PathLike[str],
        tables: Tables,
        *,
        window_batches: int = 16,
        planned_batches: int | None = None,
        memory_bytes: int | None = None,
        minibatch_rows: int | Mapping[str, int] | None = None,
        cache_bytes: int | None = None,
        policy: str = "lookahead",
        heat: str = "auto",
        engine: str = "auto",
        queue_depth: int = QUEUE_DEPTH,
        threads: int | None = None,
        check_crc: bool = False,
        direct: bool = True,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        host_cache_bytes: int = 0,
        host_policy: Literal["lookahead", "static"] = "lookahead",
        wait: Literal["stream", "warp"] = "stream",
        staging_bytes: int = 256 << 20,
    ) -> None:
        self._opened = ExitStack()  # the cache ends before the engine that it reads by
        self.store = open_store(store, self._opened)
        if not tables:
            raise ValueError("tables is empty; name at least one, such as 'paper.feat'")
        self.tables: list[Table] = list(chosen_tables(self.store, tables).values())
        self._minibatch_rows = check_minibatch_rows(minibatch_rows, [t.name for t in self.tables])
        self._window = _check_window(window_batches, planned_batches)
        self._fixed_planned = planned_batches
        if policy not in POLICIES:
            raise ValueError(f"no policy {policy!r} (there are {', '.join(POLICIES)})")
        for name, value in (
            ("memory_bytes", memory_bytes),
            ("cache_bytes", cache_bytes),
            ("host_cache_bytes", host_cache_bytes),
        ):
            if value is not None and not isinstance(value, Real):
                raise TypeError(f"{name}={value!r}; give a number of bytes, such as 8 << 30")
            if value is not None and not 0 <= value < math.inf:
                what = "is negative" if value < 0 else "is not finite"
                raise ValueError(f"{name}={value} {what}; give a number of bytes")
        memory_bytes = None if memory_bytes is None else int(memory_bytes)  # 8e9 is a float
        cache_bytes, host_cache_bytes = (
            None if cache_bytes is None else int(cache_bytes),
            int(host_cache_bytes),
        )
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(device)!r}: features go to 'cpu' or 'cuda'")
        if self.device.type == "cpu" and host_cache_bytes:
            raise ValueError(
                f"host_cache_bytes={host_cache_bytes} is for the tier under a cache on CUDA; on device='cpu' "
                "the cache is in host memory: give cache_bytes"
            )
        check_out_dtype(dtype)
        self.dtype = dtype
        self._policy = policy
        self._heat_methods = {t.name: _choose_heat(self.store, t, heat) for t in self.tables}
        threads = threads if threads is not None else torch.get_num_threads()
        if threads < 1:
            raise ValueError(f"threads={threads}; at least one thread copies rows")

        self._engine: Engine = open_engine(
            [path for t in self.tables for path in t.shard_paths],
            kind=engine,
            depth=queue_depth,
            direct=direct,
            max_read_bytes=longest_read_bytes(
                self.tables,
                memory_bytes=memory_bytes if self.device.type == "cpu" else None,
                queue_depth=queue_depth,
            ),
        )
        self._opened.callback(self._engine.close)
        self._finalizer = weakref.finalize(self, self._opened.close)
        self._placement: Placement
        if self.device.type == "cpu":
            self._placement = HostPlacement(
                self._engine,
                self.tables,
                memory_bytes=memory_bytes,
                cache_bytes=cache_bytes,
                policy=policy,
                threads=threads,
                check_crc=check_crc,
                dtype=dtype,
            )
        else:
            self._placement = DevicePlacement(
                self._engine,
                self.tables,
                device=self.device,
                memory_bytes=memory_bytes,
                cache_bytes=cache_bytes,
                host_cache_bytes=host_cache_bytes,
                host_policy=host_policy,
                policy=policy,
                check_crc=check_crc,
                dtype=dtype,
                wait=wait,
                staging_bytes=staging_bytes,
            )
        most = min(MAX_PLANNED, _core.USE_BITS - window_batches)
        self._most_planned = planned_batches or most  # lowered to what memory allows, once that is known
        self._planned = planned_batches or min(self._placement.least_planned, most)
        self._waiting = 0  # minibatches that are sampled, and not in the window yet
        self._most_waiting: int | None = None  # once memory is shared out
        self._minibatch_bytes = 0  # of the largest so far
        self._warned_of_size = False
        self._cache: Cache | None = None
        self._lock = threading.Lock()  # guards building the cache, and who has the window
        self._windowed: weakref.ref[WindowedStream[Any]] | None = None
        self._seconds = {"sample": 0.0}
        self._stage: Stage = stage_for(self.device)  # a Timeline puts itself before it
        self._misses_at_epoch = (0, 0)
        self._last_stats: dict[str, Any] | None = None  # once closed

    @property
    def window_batches(self) -> int:
        """Minibatches sampled ahead: as given; after the first minibatch, as memory allows."""
        return self._window

    @property
    def waiting_batches(self) -> int:
        """How many the `minibatches` of attach() may hold itself: as said there; then as memory allows."""
        return self._waiting

    @property
    def held_bytes(self) -> int:
        """Memory of the sampled minibatches that are held at once; part of the window in stats()."""
        return (self._window + self._planned + self._waiting) * self._minibatch_bytes

    def attach(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        *,
        bytes_of: Callable[[T], int] | None = None,
        waiting_batches: int = 0,
        source_bytes: Callable[[int], int] = lambda _waiting: 0,
        growth: float = 1.0,
    ) -> WindowedStream[T] | ReadThroughStream[T]:
        """Iterate over (minibatch, {table: features}).

        minibatches: sampled in the consumer's thread, ahead by the window. ids_of: the rows that a minibatch
        reads, int64[n] for each table, on the CPU or on the loader's device, may repeat; features come as
        [n, *shape] of the table's dtype in that order. The tensors are the consumer's to keep; on CUDA they
        are ready for the stream that is current when they are handed out. bytes_of: memory that a sampled
        minibatch takes: part of the window, within memory_bytes; on CUDA told as "minibatches", beside it.
        waiting_batches: at most so many that `minibatches` holds itself, sampled and not yet asked for; they
        count with these bytes; after the first minibatch the property of that name says how many may.
        source_bytes: other memory of `minibatches`, by the number that it holds. growth: how many times as
        large as the first minibatch the others are; memory is shared out when that one is known. Where a
        larger one comes, fewer are planned ahead; where that is not enough to stay within memory_bytes, a
        warning says so once, and names minibatch_rows.

        One stream at a time uses the window; while it is open, further ones read through the cache without
        lookahead. A stream is closed by its end, by close(), or by dropping it.

        Raises, at the minibatch that meets it: IndexError for an id out of range, StorageError for a page
        that cannot be read (the stream goes on after it), MemoryBudgetError when one does not fit.
        """
        if not self._finalizer.alive:
            raise ValueError("this FeatureLoader is closed; make a new one")

        def cache_for(minibatch: T, ids: Ids) -> Cache:
            minibatch_bytes = bytes_of(minibatch) if bytes_of else 0
            return self._cache_for(ids, minibatch_bytes, growth, source_bytes)

        with self._lock:
            if self._windowed is not None and self._windowed() is not None:
                log.warning(
                    "a stream of this loader is still open, so this one reads through the cache without "
                    "lookahead: close() the other, or end its loop, before the next epoch"
                )
                return ReadThroughStream(minibatches, ids_of, cache_for)
            self._adapt_planned()
            self._waiting = waiting_batches
            if self._most_waiting is not None:
                self._waiting = min(waiting_batches, self._most_waiting)
            me, before, begun = weakref.ref(self), self.stats(), time.perf_counter()
            stream = WindowedStream(
                minibatches,
                ids_of,
                cache_for,
                window_batches=lambda: self._window,
                planned_batches=lambda: self._planned,
                on_close=lambda: _stream_ended(me, before, begun),
                seconds=self._seconds,
                stage=self._stage,
            )
            self._windowed = weakref.ref(stream)
            return stream

    def stats(self) -> dict[str, Any]:
        """Counters since construction.

        In pages: ``hits``, ``misses``, ``coalesced`` (hits whose page was still being read), ``loads``,
        ``bypasses`` (misses that won no line), ``evictions``, ``failures``; ``hit_ratio``. Of the device:
        ``pages_read``, ``bytes_read``, ``requests``. ``seconds`` by stage: ``sample``, ``plan``, ``wait``,
        ``gather``, and ``read`` (with requests in flight, beside the others). ``memory``: bytes by purpose.
        ``window_batches``, ``planned_batches`` (those in use), ``policy``; ``heat``: the method of each
        table, or None; ``engine``: its own counters; ``tables``: the counters of each table.
        """
        if self._last_stats is not None:
            return self._last_stats
        tables = self._cache.stats() if self._cache else {}
        io = self._engine.stats()

        def total(key: str) -> Any:
            return sum(t[key] for t in tables.values())

        counters = ("pages", "hits", "misses", "coalesced", "loads", "bypasses", "evictions", "failures")
        result: dict[str, Any] = {key: total(key) for key in counters}
        result["hit_ratio"] = result["hits"] / result["pages"] if result["pages"] else 0.0
        result["pages_read"] = io["reads"]
        result["bytes_read"] = io["bytes_read"]
        result["requests"] = io["requests"]
        result["seconds"] = {
            "sample": self._seconds["sample"],
            "plan": total("enter_s") + total("plan_s") + total("retire_s"),
            "wait": total("wait_s"),
            "gather": total("gather_s"),
            "read": io["busy_s"],
        }
        result["memory"] = self._placement.memory(self._cache, self.held_bytes)
        result["window_batches"] = self._window
        result["planned_batches"] = self._planned
        result["policy"] = self._policy
        result["heat"] = dict(self._heat_methods)
        result["engine"] = {"name": self._engine.name, "note": self._engine.note, **io}
        result["tables"] = tables
        return result

    def cached_rows(self, table: str) -> torch.Tensor:
        """Which rows of a table the cache holds now: bool[row_count] on the CPU, for LocalityBias.

        Ask between two epochs: while a stream is open the answer depends on when it is asked. On CUDA the
        lines on the device count, and this waits for them. Before the first minibatch nothing is held.
        Raises KeyError for a table that this loader does not load, ValueError once closed.
        """
        found = next((t for t in self.tables if t.name == table), None)
        if found is None:
            known = ", ".join(repr(t.name) for t in self.tables)
            raise MissingError(f"no table {table!r} in this loader (it loads {known})")
        if not self._finalizer.alive:
            raise ValueError("this FeatureLoader is closed, and its cache is gone")
        if self._cache is None:
            return torch.zeros(found.row_count, dtype=torch.bool)
        resident = self._cache.page_words(table) >> np.uint64(_core.STATE_SHIFT) == _core.RESIDENT
        return torch.from_numpy(found.rows_of_pages(resident))

    def close(self) -> None:
        """End the open stream, let reads finish, close the files, free the cache. Idempotent.

        ``stats()`` goes on telling what they were.
        """
        stream = self._windowed() if self._windowed is not None else None
        if stream is not None:
            stream.close()
        if self._finalizer.alive:
            self._last_stats = self.stats()
            self._finalizer()
            self._cache = None

    def __repr__(self) -> str:
        return f"FeatureLoader({self.store.name!r}, {[t.name for t in self.tables]}, {str(self.device)!r})"

    def __enter__(self) -> FeatureLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> None:
        raise TypeError(
            "a FeatureLoader cannot be pickled; pass the FeatureStore and build one in each process"
        )

    def _cache_for(
        self, ids: Ids, minibatch_bytes: int, growth: float, source_bytes: Callable[[int], int]
    ) -> Cache:
        """The cache; built from the first minibatch's sizes, `growth` times which the others have."""
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError("this FeatureLoader is closed; make a new one")
            rows = rows_read(ids, [t.name for t in self.tables])
            if self.device.type == "cpu":  # on a device the cache has ids of its own
                minibatch_bytes = max(minibatch_bytes, sum(8 * n for n in rows.values()))
            if self._cache is None:
                first = replace(
                    self._sizes(rows, minibatch_bytes),
                    page_bytes=page_bytes_read(ids, self.tables),
                    source_bytes=source_bytes,
                )
                self._build(usual_sizes(first, given=self._minibatch_rows, growth=growth))
            else:
                self._keep_within_memory(rows, minibatch_bytes)
            self._minibatch_bytes = max(self._minibatch_bytes, minibatch_bytes)
            assert self._cache is not None
            return self._cache

    def _build(self, sizes: Sizes) -> None:
        """sizes: of usual minibatches."""
        heats = {t.name: heat for t in self.tables if (heat := self._heat(t)) is not None}
        self._cache, plan = self._placement.build(sizes, heats)
        self._opened.callback(self._cache.close)
        self._window = plan.sizes.window_batches
        self._most_planned = plan.sizes.planned_batches
        self._planned = min(self._planned, self._most_planned)
        self._waiting = self._most_waiting = plan.sizes.waiting_batches
        if log.isEnabledFor(logging.INFO):
            log.info(memory_line(self.tables, self._placement, sizes, plan))

    def _sizes(self, rows: Rows, minibatch_bytes: int) -> Sizes:
        return Sizes(
            rows=rows,
            page_bytes=0,
            minibatch_bytes=minibatch_bytes,
            window_batches=self._window,
            planned_batches=self._planned,
            most_planned_batches=self._most_planned,
            least_planned_batches=self._fixed_planned or 1,
            waiting_batches=self._waiting,
        )

    def _keep_within_memory(self, rows: Rows, minibatch_bytes: int) -> None:
        """Plan fewer minibatches at once where those of this size need it; warn when that is not enough."""
        excess = self._placement.excess_bytes(self._sizes(rows, minibatch_bytes))
        while excess > 0 and self._fixed_planned is None and self._planned > self._placement.least_planned:
            self._planned -= 1
            self._most_planned = self._planned
            excess = self._placement.excess_bytes(self._sizes(rows, minibatch_bytes))
        if excess > 0 and not self._warned_of_size:
            self._warned_of_size = True
            log.warning(too_large(rows, excess))

    def _heat(self, table: Table) -> npt.NDArray[np.uint8] | None:
        method = self._heat_methods[table.name]
        if method is None:
            return None
        assert isinstance(table.type, str)
        return page_heat(self.store.heat(method, table.type), table.rows_per_page, table.order)

    def _adapt_planned(self) -> None:
        """Between epochs: the fewest planned minibatches whose missing pages cover twice the queue."""
        if self._fixed_planned is not None or self._cache is None:
            return
        tables = self._cache.stats().values()
        steps = max(t["steps"] for t in tables)
        misses = sum(t["misses"] for t in tables)
        epoch_steps, epoch_misses = steps - self._misses_at_epoch[0], misses - self._misses_at_epoch[1]
        self._misses_at_epoch = (steps, misses)
        if epoch_steps == 0:
            return
        wanted = math.ceil(2 * self._engine.depth * epoch_steps / max(1, epoch_misses))
        self._planned = min(max(self._placement.least_planned, wanted), self._most_planned)


def check_option_names(caller: str, options: Iterable[str]) -> None:
    """Raise TypeError for what is no argument of FeatureLoader's. caller: takes them beside its own."""
    parameters = inspect.signature(FeatureLoader).parameters
    known = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise TypeError(
                f"{caller} has no argument {name!r}; beside its own it takes gids.FeatureLoader's: "
                f"{', '.join(known)}"
            )


def _choose_heat(store: FeatureStore, table: Table, heat: str) -> str | None:
    """The method of heat for a table, or None: nothing is known of its rows beforehand."""
    if heat not in ("auto", "none", *HEAT_ROLES):
        raise ValueError(f"no heat {heat!r} (there are 'auto', {', '.join(map(repr, HEAT_ROLES))}, 'none')")
    if not isinstance(table.type, str) or heat == "none" or not is_of_nodes(table, store):
        return None
    if heat == "auto":
        return next(iter(store.heat_methods(table.type)), None)
    store.heat(heat, table.type)  # KeyError: not stored, and how to compute it
    return heat


def _check_window(window_batches: int, planned_batches: int | None) -> int:
    if planned_batches is not None and not 1 <= planned_batches <= MAX_PLANNED:
        raise ValueError(f"planned_batches={planned_batches} is outside 1 to {MAX_PLANNED}")
    if window_batches < 0:
        raise ValueError(f"window_batches={window_batches} is negative; 0 turns lookahead off")
    planned = planned_batches or 1
    if window_batches + planned > _core.USE_BITS:
        raise ValueError(
            f"window_batches={window_batches} with planned_batches={planned} makes "
            f"{window_batches + planned} live minibatches, and a page's word has marks for "
            f"{_core.USE_BITS}: lower one of them"
        )
    return window_batches


def _stream_ended(loader: weakref.ref[FeatureLoader], before: dict[str, Any], begun: float) -> None:
    me = loader()
    if me is None:
        return
    me._windowed = None
    if log.isEnabledFor(logging.INFO) and me._finalizer.alive:
        line = epoch_summary(before, me.stats(), time.perf_counter() - begun)
        if line is not None:
            log.info(line)
