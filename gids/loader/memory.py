"""How a FeatureLoader's memory is divided, once, at the first minibatch: sizes of minibatches, cache, log.

The cache is in host memory, or on a CUDA device with more lines in host memory. Called by FeatureLoader,
which borrows the memory. The stream decides when steps enter, are planned and gathered.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gids import _core, cuda
from gids.cache import FeatureCache, HostBudget, MemoryPlan
from gids.cache.budget import OTHERS, Sizes, available_bytes, row_orders
from gids.cache.device import DeviceBudget, DeviceFeatureCache
from gids.cache.output_dtype import out_row_bytes
from gids.cuda import on_host
from gids.errors import MissingError
from gids.io.device.device_queue import queue_device_bytes
from gids.io.device.kvikio_reader import open_kvikio_reader
from gids.loader.options import MAX_PLANNED
from gids.loader.rows import Cache, EpochInput, Ids
from gids.loader.stats import is_size
from gids.sizes import format_bytes
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.cache.budget import Budget
    from gids.io import Engine
    from gids.io.speed import DiskSpeed
    from gids.loader.options import Options
    from gids.store import Table

log = logging.getLogger("gids")

_ADAPT_STEPS = 16
"""Minibatches after which the number of planned ones adapts again."""

Rows = dict[str, int]
"""Number of rows by table."""


def check_minibatch_rows(
    minibatch_rows: int | Mapping[str, int] | None, tables: Iterable[str]
) -> Rows | None:
    """FeatureLoader's minibatch_rows, by table.

    Raises KeyError for a table that it does not load, TypeError and ValueError for other values.
    """
    if minibatch_rows is None:
        return None
    names = list(tables)
    by_table = minibatch_rows if isinstance(minibatch_rows, Mapping) else dict.fromkeys(names, minibatch_rows)
    for name, count in by_table.items():
        if name not in names:
            raise MissingError(
                f"minibatch_rows names {name!r}, and the tables are {', '.join(map(repr, names))}"
            )
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"minibatch_rows={minibatch_rows!r}: give a number of rows, or a number by table")
        if count < 0:
            raise ValueError(f"minibatch_rows={minibatch_rows!r}: a number of rows must be 0 or more")
    return {name: int(by_table.get(name, 0)) for name in names}


def rows_read(ids: Mapping[str, Any], tables: Iterable[str]) -> Rows:
    """Number of rows that a minibatch reads, by table. Ids need not be checked yet."""
    return {name: math.prod(np.shape(ids.get(name, ()))) for name in tables}


def page_bytes_read(ids: Mapping[str, Any], tables: Iterable[Table]) -> int:
    """Bytes of the pages that hold a minibatch's rows, each page once. Called for the first minibatch only.

    Ids need not be checked yet.
    """
    total, copies = 0, on_host(ids)
    for table in tables:
        of_table = copies.get(table.name)
        if not isinstance(of_table, torch.Tensor) or of_table.dtype != torch.int64 or of_table.is_meta:
            continue  # none, or refused when the minibatch enters the cache
        rows = of_table.numpy().ravel()
        if table.order is not None:
            rows = positions_of(rows, table.order)
        total += table.page_bytes * len(np.unique(rows // table.rows_per_page))
    return total


def expected_sizes(first: Sizes, largest: Rows | None) -> Sizes:
    """The sizes to divide memory for. first: of the first minibatch. largest: rows of the largest one, by the
    user; then no room is left for larger ones."""
    if largest is None:
        return first
    rows = larger(first.rows, largest)
    times = sum(rows.values()) / max(1, sum(first.rows.values()))
    return replace(first.grown(times), rows=rows, growth=1.0)


def larger(rows: Mapping[str, int], others: Mapping[str, int]) -> Rows:
    """The larger number of each table of `rows`."""
    return {name: max(n, others.get(name, 0)) for name, n in rows.items()}


def _fits(rows: Rows, minibatch_bytes: int, sizes: Sizes) -> bool:
    """Whether a minibatch is at most as large as sizes say."""
    return minibatch_bytes <= sizes.minibatch_bytes and all(n <= sizes.rows[t] for t, n in rows.items())


Heats = Mapping[str, npt.NDArray[np.uint8]]

KEPT_HEAT = 255
"""The heat of pages that keep their lines for good, if some do."""


def _kept_at_most(heat: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    """With so many pages at most that keep their lines; more would leave too few to the others."""
    kept = np.flatnonzero(heat == KEPT_HEAT)
    heat = heat.copy()
    heat[kept[count:]] = KEPT_HEAT - 1
    return heat


class Placement(ABC):
    """Where the cache of a FeatureLoader is. Divides memory, and builds the cache, at the first minibatch.

    expected: rows of the largest minibatch, by the user, or None. speed: of the disks, if the number of
    planned minibatches follows from it. pinned: features are in pinned memory.

    Attributes: cache: None before the first minibatch, and after release(). plan: how memory is divided; None
    before the first minibatch. end: closes the cache. planned: minibatches that are read at once. waiting:
    sampled ones that are not in the window yet. minibatch_bytes: memory of the largest sampled one so far.
    """

    least_planned: int
    """The least number of planned minibatches, if memory allows, so that their stages overlap."""

    memories: frozenset[str]
    """The memories that the cache takes: "host", "cuda:INDEX", or both."""

    on_host = True

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        memory_bytes: int,
        dtype: torch.dtype | None,
        expected: Rows | None,
        speed: DiskSpeed | None,
        *,
        pinned: bool = False,
    ) -> None:
        self._engine, self.tables, self._options, self._dtype = engine, tables, options, dtype
        self.expected, self._speed, self._pinned = expected, speed, pinned
        self._budget = self._budget_of(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
        )
        self.cache: Cache | None = None
        self.plan: MemoryPlan | None = None
        self.end = ExitStack()
        self.minibatch_bytes = self.waiting = 0
        most = options.planned or min(MAX_PLANNED, _core.USE_BITS - options.window)
        self._wanted = Sizes(  # the rows follow with the first minibatch
            rows={},
            page_bytes=0,
            minibatch_bytes=0,
            window_batches=options.window,
            planned_batches=options.planned or min(self.least_planned, most),
            most_planned_batches=most,
            least_planned_batches=options.planned or 1,
        )
        self.planned = self._wanted.planned_batches
        self._warned = False  # of a larger one
        self._counted: dict[str, dict[str, Any]] = {}  # by caches that were released
        self._adapted_to = (0, 0, 0)  # steps, pages and hits, when planned adapted last
        self._adapt_at = 0  # a step of the cache

    @property
    def sizes(self) -> Sizes:
        """The minibatches that memory is divided for; without a cache, the window and the planned minibatches
        that the user wants."""
        return self._wanted if self.cache is None or self.plan is None else self.plan.sizes

    @property
    def window(self) -> int:
        """Minibatches sampled ahead: as the user wants; with a cache, as memory allows."""
        return self.sizes.window_batches

    @property
    def most_planned(self) -> int:
        """The most minibatches that are planned at once."""
        return self.sizes.planned_batches

    @property
    def memory_bytes(self) -> int:
        """The budget: bytes of host memory, or of device memory."""
        return self._budget.memory_bytes

    def leave_to_others(self, nbytes: int) -> None:
        """Other loaders keep so many bytes of the budget."""
        self._budget = replace(self._budget, others_bytes=nbytes)

    @property
    def held_bytes(self) -> int:
        """Memory of the sampled minibatches that are held at once."""
        return (self.sizes.live_batches + self.waiting) * self.minibatch_bytes

    def allow_waiting(self, batches: int) -> None:
        """So many sampled minibatches may wait to enter the window, if memory allows."""
        self.waiting = batches if self.cache is None else min(batches, self.sizes.waiting_batches)

    def cache_for(
        self, epoch: EpochInput[Any], ids: Ids, minibatch_bytes: int, *, build: Callable[[Sizes], None]
    ) -> Cache:
        """The cache for a minibatch.

        build: calls build(), if there is no cache. After release() memory is divided for the same minibatches
        as before. Warns once of a minibatch that needs more memory than there is beside the lines.
        """
        rows = rows_read(ids, [t.name for t in self.tables])
        if self.on_host:  # on a device the cache copies the ids
            minibatch_bytes = max(minibatch_bytes, 8 * sum(rows.values()))
        if self.cache is None:
            wanted = self._wanted
            if not wanted.rows:
                pages = page_bytes_read(ids, self.tables)
                first = replace(wanted, rows=rows, page_bytes=pages, minibatch_bytes=minibatch_bytes)
                wanted = first.grown(epoch.growth)
            now = replace(wanted, waiting_batches=self.waiting, source_bytes=epoch.source_bytes)
            build(expected_sizes(now, self.expected))
            self._wanted = wanted  # not before: a minibatch that does not fit does not count
        self._warn_if_above(rows, minibatch_bytes)
        self.minibatch_bytes = max(self.minibatch_bytes, minibatch_bytes)
        assert self.cache is not None
        return self.cache

    def _warn_if_above(self, rows: Rows, minibatch_bytes: int) -> None:
        """Warn, once, of a minibatch that needs more memory than there is beside the lines.

        Not of one that is a little larger than the first if lines are few: that warning says what is enough.
        """
        sizes = self.sizes
        if self._warned or _fits(rows, minibatch_bytes, sizes):
            return
        usual = expected_sizes(self._wanted, self.expected)
        if self._few_lines(usual):
            usual = usual.grown(usual.growth)
        most = replace(
            sizes,
            rows=larger(sizes.rows, usual.rows),
            minibatch_bytes=max(sizes.minibatch_bytes, usual.minibatch_bytes),
        )
        if _fits(rows, minibatch_bytes, most):
            return
        assert self.plan is not None
        sizes = replace(
            sizes, rows=larger(rows, sizes.rows), minibatch_bytes=max(minibatch_bytes, sizes.minibatch_bytes)
        )
        above = sum({**self.plan.purposes, **self._budget.needed(sizes)}.values()) - self.memory_bytes
        if above > 0:
            self._warned = True
            read = {name: n for name, n in rows.items() if n}
            log.warning(
                "a minibatch of %s rows is larger than memory was divided for: the loader may use %s more "
                "than %s=%d. Give minibatch_rows=%s, or what is the most that a minibatch reads",
                f"{sum(rows.values()):,}",
                format_bytes(above),
                self._budget.option,
                self.memory_bytes,
                next(iter(read.values()), 0) if len(rows) == 1 else read,
            )

    def build(self, sizes: Sizes, heats: Heats) -> None:
        """Divide memory, and build the cache. Logs how; warns, the first time, if that is too little.

        sizes: of minibatches like the first one, with the window and planned minibatches that the user wants.
        Raises MemoryBudgetError, which lists the sum, if one minibatch does not fit.
        """
        first = self.plan is None
        self.plan = plan = self._budget.share(sizes)
        self.cache = cache = self._cache(plan, heats)
        self.end.callback(cache.close)
        self.planned = min(self.planned, plan.sizes.planned_batches)
        self.waiting = plan.sizes.waiting_batches
        if first:
            self._warn_of_little(sizes)
        log.info(
            "memory of %s: %s, with a window of %d minibatches",
            format_bytes(self.memory_bytes),
            ", ".join(f"{name} {format_bytes(n)}" for name, n in plan.purposes.items() if n),
            plan.sizes.window_batches,
        )

    def _few_lines(self, sizes: Sizes) -> bool:
        """Whether lines hold less than half of such a minibatch's pages, and cache= allows more."""
        assert self.plan is not None
        return not self.plan.capped and self.plan.line_bytes < sizes.page_bytes // 2

    def _warn_of_little(self, wanted: Sizes) -> None:
        """Warn of lines for less than half of a minibatch's pages, unless cache= does not allow more; and of
        memory that the machine does not have."""
        plan, needed = self.plan, wanted.page_bytes // 2
        assert plan is not None
        if self._few_lines(wanted):
            advised = self._budget.enough_for_lines(wanted, needed - plan.line_bytes + plan.purposes["lines"])
            log.warning(
                "%s=%d leaves %s for the cache, and a minibatch reads pages of %s: most pages are read again "
                "for each minibatch. Give %s=%s or more, or use smaller minibatches",
                self._budget.option,
                self.memory_bytes,
                format_bytes(plan.line_bytes),
                format_bytes(wanted.page_bytes),
                self._budget.option,
                advised,
            )
        own, available = sum(plan.purposes.values()) - plan.purposes.get(OTHERS, 0), available_bytes()
        if self.on_host and own > available:
            log.warning(
                "the loader is going to use %s of memory, and %s are available: give a smaller memory=",
                format_bytes(own),
                format_bytes(available),
            )

    def release(self) -> None:
        """Free the cache, if there is one. Its counters stay."""
        if self.cache is not None:
            self._counted = self.table_stats()
            self.cache = None
            self.end.close()
            self.planned, self.waiting, self._adapt_at = self._wanted.planned_batches, 0, 0

    def planned_now(self) -> int:
        """Minibatches to plan ahead. On the CPU they adapt within an epoch too."""
        if self.on_host and self.cache is not None and self.cache.next_step >= self._adapt_at:
            self.adapt_planned()
        return self.planned

    def adapt_planned(self) -> None:
        """Plan the fewest minibatches whose misses keep the disks busy, if they are like the last ones."""
        if self._speed is None or self.cache is None:
            return
        tables = self.table_stats().values()
        counted = (
            max(t["steps"] for t in tables),
            sum(t["pages"] for t in tables),
            sum(t["hits"] for t in tables),
        )
        steps, pages, hits = (now - before for now, before in zip(counted, self._adapted_to, strict=True))
        self._adapted_to = counted
        self._adapt_at = self.cache.next_step + _ADAPT_STEPS
        if steps == 0:
            return
        wanted = self._speed.minibatches(pages / steps, hits / max(1, pages))
        self.planned = min(max(self.least_planned, wanted), self.most_planned)

    def table_stats(self) -> dict[str, dict[str, Any]]:
        """Counters of each table, including released caches. Sizes are of the present cache."""
        present = self.cache.stats() if self.cache is not None else {}
        return {
            name: {
                key: present.get(name, {}).get(key, 0) + (0 if is_size(key) else before.get(key, 0))
                for key in (present.get(name) or before)
            }
            for name in (present or self._counted)
            for before in [self._counted.get(name, {})]
        }

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""

    @abstractmethod
    def _budget_of(self, **common: Any) -> Budget:
        """The budget. common: fields that all budgets have."""

    @abstractmethod
    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache: ...


class HostPlacement(Placement):
    """Lines and features in host memory."""

    least_planned = 2
    memories = frozenset({"host"})
    keep = False
    """Whether pages of heat 255 keep their lines for good."""

    def _budget_of(self, **common: Any) -> HostBudget:
        return HostBudget(bounce_bytes=self._engine.bounce_bytes, pinned=self._pinned, **common)

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        if self.keep:
            heats = {name: _kept_at_most(heat, plan.lines[name] // 2) for name, heat in heats.items()}
        return FeatureCache(
            self._engine,
            self.tables,
            lines=plan.lines,
            heats=heats,
            policy=self._options.policy,
            keep=self.keep,
            threads=self._options.threads or torch.get_num_threads(),
            check_crc=self._options.check_crc,
            keep_output_bytes=plan.purposes["outputs"],
            output_rows=plan.sizes.rows,
            output_dtype=self._dtype,
            pinned=self._pinned,
        )

    def memory(self) -> dict[str, int]:
        kept = {"bounce pool": self._engine.bounce_bytes} | row_orders(self.tables)
        if self.cache is None:
            return kept
        purposes = self.cache.memory()
        purposes["window"] += self.held_bytes
        return purposes | kept


class DevicePlacement(Placement):
    """Lines in device memory and pinned host memory; features in device memory."""

    least_planned = 3  # one is read, one is gathered, one is with the consumer
    on_host = False

    def __init__(
        self,
        device: cuda.Device,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        memory_bytes: int,
        dtype: torch.dtype | None,
        expected: Rows | None,
        speed: DiskSpeed | None,
    ) -> None:
        self.device = device
        self._host_cache_bytes = 0 if options.memory is None else options.memory - options.staging
        own = f"cuda:{device.index}"
        self.memories = frozenset({own, "host"} if self._host_cache_bytes else {own})
        super().__init__(engine, tables, options, memory_bytes, dtype, expected, speed)

    def _budget_of(self, **common: Any) -> DeviceBudget:
        return DeviceBudget(
            bounce_bytes=queue_device_bytes(self._options.staging, [t.page_bytes for t in self.tables]),
            host_cache_bytes=self._host_cache_bytes,
            **common,
        )

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        options = self._options
        with ExitStack() as stack:
            kvikio = None
            if any(plan.lines.values()) and heats and not options.check_crc:
                paths = [shard for t in self.tables for shard in t.shards]
                if (kvikio := open_kvikio_reader(self.device, paths)) is not None:
                    stack.enter_context(kvikio)
            return DeviceFeatureCache(
                self.device,
                self._engine,
                self.tables,
                lines=plan.lines,
                host_lines=plan.host_lines,
                heats=heats,
                policy=options.policy,
                host_policy=options.host_policy,
                output_dtype=self._dtype,
                check_crc=options.check_crc,
                staging_bytes=options.staging,
                kvikio=kvikio,
            )

    def memory(self) -> dict[str, int]:
        return {} if self.cache is None else self.cache.memory() | {"minibatches": self.held_bytes}
