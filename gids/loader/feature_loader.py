"""FeatureLoader: attaches features to a stream of sampled minibatches.

The composition of store, I/O engine, cache and window; the adapters for DGL and others are thin wrappers of
it. It decides sizes (memory, depth), and nothing per row.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache import POLICIES, FeatureCache, MemoryPlan, page_heat, share_memory
from gids.cache.budget import available_bytes, format_bytes
from gids.io import Engine, open_engine
from gids.loader.stream import IdsOf, ReadThroughStream, WindowedStream
from gids.store import FeatureStore, Table
from gids.store.names import HEAT_ROLES

T = TypeVar("T")
log = logging.getLogger("gids")

MAX_PLANNED = 8


class FeatureLoader:
    """Feature rows for sampled minibatches, read ahead through a cache.

    Args:
        store: the dataset, or its path.
        tables: names of the tables to load, such as ``"paper.feat"``.
        window_batches: minibatches sampled ahead, whose pages the cache keeps. 0 to 23.
        planned_batches: minibatches whose reads are in flight or done, before they are handed out. None
            starts with 2 and, between epochs, takes the least number whose missing pages cover twice the
            queue depth. ``window_batches + planned_batches`` is at most 24.
        memory_bytes: for everything: cache lines, outputs, bounce pool, window, page tables. None takes half
            of the memory available.
        cache_bytes: at most so much of it for cache lines; 0 works, without a cache.
        policy: ``"lookahead"``, ``"window-pin"``, ``"random"``, ``"lru"`` or ``"static"``.
        heat: which stored heat of nodes the policy falls back on: ``"out-degree"`` (conversion stores it),
            ``"reverse-pagerank"`` or ``"sampled"`` (``gids heat`` does), or ``"none"``. ``"auto"`` takes, for
            each table, the first that is there of reverse-pagerank, sampled, out-degree. Rows of edges have
            none.
        engine: ``"auto"``, ``"uring"``, ``"threads"`` or ``"mmap"``.
        queue_depth: requests in flight at the device.
        threads: that copy rows. None takes torch's number.
        check_crc: compare every page read with its checksum.
        direct: read past the page cache (O_DIRECT).
        device: ``"cpu"``.

    Raises KeyError for a table, or a heat, that the store does not have, ValueError for a number out of its
    range, StorageError for shards that cannot be opened. MemoryBudgetError (a ValueError) comes with the
    first minibatch, which shows how much memory one needs.
    """

    def __init__(
        self,
        store: FeatureStore | str | os.PathLike[str],
        tables: Sequence[str],
        *,
        window_batches: int = 16,
        planned_batches: int | None = None,
        memory_bytes: int | None = None,
        cache_bytes: int | None = None,
        policy: str = "lookahead",
        heat: str = "auto",
        engine: str = "auto",
        queue_depth: int = 256,
        threads: int | None = None,
        check_crc: bool = False,
        direct: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        self.store = store if isinstance(store, FeatureStore) else FeatureStore(store)
        if not tables:
            raise ValueError("tables is empty; name at least one, such as 'paper.feat'")
        self.tables: list[Table] = [self.store.table(name) for name in dict.fromkeys(tables)]
        self._window = _check_window(window_batches, planned_batches)
        self._fixed_planned = planned_batches
        self._planned = planned_batches or max(1, min(2, _core.USE_BITS - window_batches))
        if policy not in POLICIES:
            raise ValueError(f"no policy {policy!r} (there are {', '.join(POLICIES)})")
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"device={str(device)!r}: this loader hands features out in host memory; use device='cpu'"
            )
        for name, value in (("memory_bytes", memory_bytes), ("cache_bytes", cache_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} is negative; give a number of bytes")
        if memory_bytes is None:
            memory_bytes = available_bytes() // 2
            log.info(
                "memory_bytes not given: taking half of what is available, %s", format_bytes(memory_bytes)
            )
        self._memory_bytes = memory_bytes
        self._cache_bytes = cache_bytes
        self._policy = policy
        self._heat_methods = {t.name: _choose_heat(self.store, t, heat) for t in self.tables}
        self._check_crc = check_crc
        self._threads = threads if threads is not None else torch.get_num_threads()
        if self._threads < 1:
            raise ValueError(f"threads={threads}; at least one thread copies rows")

        self._engine: Engine = open_engine(
            [path for t in self.tables for path in t.shard_paths],
            kind=engine,
            depth=queue_depth,
            direct=direct,
            max_read_bytes=max(t.page_bytes for t in self.tables),
        )
        self._plan: MemoryPlan | None = None
        self._cache: FeatureCache | None = None
        self._minibatch_bytes = 0
        self._lock = threading.Lock()  # guards building the cache, and who has the window
        self._windowed: weakref.ref[WindowedStream[Any]] | None = None
        self._seconds = {"sample": 0.0}
        self._misses_at_epoch = (0, 0)
        self._last_stats: dict[str, Any] | None = None  # once closed
        self._finalizer = weakref.finalize(self, self._engine.close)

    def attach(
        self,
        minibatches: Iterable[T],
        ids_of: IdsOf[T],
        *,
        bytes_of: Callable[[T], int] | None = None,
    ) -> WindowedStream[T] | ReadThroughStream[T]:
        """Iterate over (minibatch, {table: features}).

        minibatches: sampled in the consumer's thread, ahead by the window. ids_of: the rows that a minibatch
        reads, int64[n] on the CPU for each table, may repeat; features come as [n, *shape] of the table's
        dtype in that order. The tensors are the consumer's to keep. bytes_of: memory that a sampled minibatch
        takes, counted as part of the window.

        One stream at a time uses the window; while it is open, further ones read through the cache without
        lookahead. A stream is closed by its end, by close(), or by dropping it.

        Raises, at the minibatch that meets it: IndexError for an id out of range, StorageError for a page
        that cannot be read (the stream goes on after it), MemoryBudgetError when one does not fit.
        """
        if not self._finalizer.alive:
            raise ValueError("this FeatureLoader is closed; make a new one")

        def cache_for(minibatch: T, ids: Mapping[str, torch.Tensor]) -> FeatureCache:
            return self._cache_for(ids, bytes_of(minibatch) if bytes_of else 0)

        with self._lock:
            if self._windowed is not None and self._windowed() is not None:
                log.info("a stream of this loader is still open: this one reads through, without lookahead")
                return ReadThroughStream(minibatches, ids_of, cache_for)
            self._adapt_planned()
            me = weakref.ref(self)
            stream = WindowedStream(
                minibatches,
                ids_of,
                cache_for,
                window_batches=self._window,
                planned_batches=lambda: self._planned,
                on_close=lambda: _window_is_free(me),
                seconds=self._seconds,
            )
            self._windowed = weakref.ref(stream)
            return stream

    def stats(self) -> dict[str, Any]:
        """Counters since construction.

        In pages: ``hits``, ``misses``, ``coalesced`` (hits whose page was still being read), ``loads``,
        ``bypasses`` (misses that won no line), ``evictions``, ``failures``; ``hit_ratio``. Of the device:
        ``pages_read``, ``bytes_read``, ``requests``. ``seconds`` by stage: ``sample``, ``plan``, ``wait``,
        ``gather``, and ``read`` (with requests in flight, beside the others). ``memory``: bytes by purpose.
        ``window_batches``, ``planned_batches``, ``policy``; ``heat``: the method of each table, or None;
        ``engine``: its own counters; ``tables``: the counters of each table.
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
        result["memory"] = self._memory(tables)
        result["window_batches"] = self._window
        result["planned_batches"] = self._planned
        result["policy"] = self._policy
        result["heat"] = dict(self._heat_methods)
        result["engine"] = {"name": self._engine.name, "note": self._engine.note, **io}
        result["tables"] = tables
        return result

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

    def __enter__(self) -> FeatureLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> None:
        raise TypeError(
            "a FeatureLoader cannot be pickled; pass the FeatureStore and build one in each process"
        )

    def _cache_for(self, ids: Mapping[str, torch.Tensor], minibatch_bytes: int) -> FeatureCache:
        """The cache; built from the first minibatch's sizes."""
        with self._lock:
            if self._cache is not None:
                return self._cache
            rows = {t.name: len(ids[t.name]) if t.name in ids else 0 for t in self.tables}
            self._plan = share_memory(
                self.tables,
                memory_bytes=self._memory_bytes,
                cache_bytes=self._cache_bytes,
                rows=rows,
                window_batches=self._window,
                planned_batches=self._planned,
                most_planned_batches=self._fixed_planned or min(MAX_PLANNED, _core.USE_BITS - self._window),
                minibatch_bytes=minibatch_bytes,
                bounce_bytes=self._engine.bounce_bytes,
            )
            self._minibatch_bytes = minibatch_bytes
            self._cache = FeatureCache(
                self._engine,
                self.tables,
                lines=self._plan.lines,
                heats={t.name: heat for t in self.tables if (heat := self._heat(t)) is not None},
                policy=self._policy,
                threads=self._threads,
                check_crc=self._check_crc,
                keep_output_bytes=self._plan.purposes["outputs"],
            )
            return self._cache

    def _heat(self, table: Table) -> npt.NDArray[np.uint8] | None:
        method = self._heat_methods[table.name]
        if method is None:
            return None
        assert isinstance(table.type, str)
        return page_heat(self.store.heat(method, table.type), table.rows_per_page)

    def _memory(self, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        if self._cache is None:
            return {"bounce pool": self._engine.bounce_bytes}
        _, outputs = self._cache.output_bytes()
        live = self._window + self._planned
        return {
            "page tables": sum(t["page_table_bytes"] for t in tables.values()),
            "lines": sum(t["lines_bytes"] for t in tables.values()),
            "line metadata": sum(t["line_metadata_bytes"] for t in tables.values()),
            "outputs": outputs,
            "window": sum(t["step_bytes"] for t in tables.values()) + live * self._minibatch_bytes,
            "bounce pool": self._engine.bounce_bytes,
        }

    def _adapt_planned(self) -> None:
        """Between epochs: the fewest planned minibatches whose missing pages cover twice the queue."""
        if self._fixed_planned is not None or self._cache is None or self._plan is None:
            return
        tables = self._cache.stats().values()
        steps = max(t["steps"] for t in tables)
        misses = sum(t["misses"] for t in tables)
        epoch_steps, epoch_misses = steps - self._misses_at_epoch[0], misses - self._misses_at_epoch[1]
        self._misses_at_epoch = (steps, misses)
        if epoch_steps == 0:
            return
        wanted = math.ceil(2 * self._engine.depth * epoch_steps / max(1, epoch_misses))
        self._planned = min(max(2, wanted), self._plan.most_planned_batches)


def _choose_heat(store: FeatureStore, table: Table, heat: str) -> str | None:
    """The method of heat for a table, or None: nothing is known of its rows beforehand."""
    if heat not in ("auto", "none", *HEAT_ROLES):
        raise ValueError(f"no heat {heat!r} (there are 'auto', {', '.join(map(repr, HEAT_ROLES))}, 'none')")
    if not isinstance(table.type, str) or heat == "none":
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


def _window_is_free(loader: weakref.ref[FeatureLoader]) -> None:
    me = loader()
    if me is not None:
        me._windowed = None
