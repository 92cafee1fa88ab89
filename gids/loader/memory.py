"""How a FeatureLoader's memory is shared out: sizes of minibatches, the placement of its cache, the log line.

The cache is in host memory, or on a CUDA device with more lines in host memory. Called by FeatureLoader. The
stream decides when steps enter, are planned and gathered.
"""

from __future__ import annotations

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

from gids import cuda
from gids.cache import FeatureCache, HostBudget, MemoryPlan
from gids.cache.budget import Sizes, advised_bytes, row_orders
from gids.cache.device import DeviceBudget, DeviceFeatureCache
from gids.cache.device.reads import COPY_BUFFERS
from gids.cache.output_dtype import out_row_bytes
from gids.cuda import on_host
from gids.errors import MissingError
from gids.io.device.kvikio_reader import open_extent_reader
from gids.io.disks import disk_count
from gids.loader.readers import Cache
from gids.sizes import format_bytes
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.cache.budget import Budget
    from gids.io import Engine
    from gids.loader.options import Options
    from gids.store import Table


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


def usual_sizes(first: Sizes, *, largest: Rows | None, growth: float, seen: Rows) -> Sizes:
    """Expected sizes of minibatches, known at the first one.

    first: its sizes. largest: rows of the largest, by the user; then no room is left for larger ones. growth:
    size of the others, relative to the first. seen: rows of the largest minibatch of earlier epochs.
    """
    if largest is None:
        usual = first.grown(growth)
        return replace(usual, rows=larger(usual.rows, seen))
    rows = larger(larger(first.rows, largest), seen)
    times = sum(rows.values()) / max(1, sum(first.rows.values()))
    return replace(first.grown(times), rows=rows, growths=(1.0,))


def larger(rows: Mapping[str, int], others: Mapping[str, int]) -> Rows:
    """The larger number of each table of `rows`."""
    return {name: max(n, others.get(name, 0)) for name, n in rows.items()}


def too_large(rows: Mapping[str, int], excess_bytes: int, *, in_time: bool) -> str:
    """The warning about a minibatch that is larger than expected. in_time: whether the next epoch can leave
    room for it."""
    wanted = {name: n for name, n in rows.items() if n}
    option = next(iter(wanted.values())) if len(rows) == 1 else wanted
    what = f"a minibatch reads {sum(rows.values()):,} rows, and needs more memory than expected"
    more = f"may use {format_bytes(excess_bytes)} more than its memory budget"
    if not in_time:
        return f"{what}: the loader {more}, in later epochs too: give more memory, or use smaller minibatches"
    return (
        f"{what}: this epoch {more}, and more if later minibatches are larger still; the next one leaves "
        f"room for the largest. To leave room from the start, give its rows: minibatch_rows={option}, or "
        "what is the most"
    )


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
    """Builds the cache once the sizes of minibatches are known."""

    least_planned: int
    """The least number of planned minibatches, if memory allows, so that their stages overlap."""

    option: str
    """The argument of gids.open() that gives the budget."""

    memories: frozenset[str]
    """The memories that the cache takes: "host", "cuda:INDEX", or both."""

    plan: MemoryPlan | None = None
    """How memory is shared out, once build() has done so."""

    _budget: Budget

    @property
    def memory_bytes(self) -> int:
        """The budget: bytes of host memory, or of device memory."""
        return self._budget.memory_bytes

    @memory_bytes.setter
    def memory_bytes(self, memory_bytes: int) -> None:
        self._budget = replace(self._budget, memory_bytes=memory_bytes)

    def build(self, sizes: Sizes, heats: Heats) -> tuple[Cache, MemoryPlan]:
        """Build the cache; returns it with the memory plan.

        sizes: of minibatches like the first one, with the window and planned minibatches that the user wants.
        Raises MemoryBudgetError, which lists the sum, if one minibatch does not fit.
        """
        self.plan = self._budget.share(sizes)
        return self._cache(self.plan, heats), self.plan

    def share(self, sizes: Sizes, memory_bytes: int) -> MemoryPlan:
        """The plan for another budget. Raises like build()."""
        return replace(self._budget, memory_bytes=memory_bytes).share(sizes)

    def excess_bytes(self, sizes: Sizes) -> int:
        """Bytes beyond memory_bytes that minibatches of these sizes need beside the existing lines.

        0 or less if they fit. Requires build().
        """
        assert self.plan is not None
        return sum({**self.plan.purposes, **self._needed(sizes, self.plan)}.values()) - self.memory_bytes

    @abstractmethod
    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        """Bytes by purpose. held_bytes: of the sampled minibatches."""

    @abstractmethod
    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache: ...

    @abstractmethod
    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need in a cache of this plan."""


class HostPlacement(Placement):
    """Lines and features in host memory."""

    least_planned = 2
    option = "memory"
    memories = frozenset({"host"})
    keep = False
    """Whether pages of heat 255 keep their lines for good."""

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        *,
        memory_bytes: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._engine, self._tables, self._options, self._dtype = engine, tables, options, dtype
        self._threads = options.threads or torch.get_num_threads()
        self._budget: HostBudget = HostBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=engine.bounce_bytes,
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
        )

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        if self.keep:
            heats = {name: _kept_at_most(heat, plan.lines[name] // 2) for name, heat in heats.items()}
        return FeatureCache(
            self._engine,
            self._tables,
            lines=plan.lines,
            heats=heats,
            policy=self._options.policy,
            keep=self.keep,
            threads=self._threads,
            check_crc=self._options.check_crc,
            keep_output_bytes=plan.purposes["outputs"],
            output_rows=plan.sizes.rows,
            late_outputs=plan.late_outputs,
            output_dtype=self._dtype,
        )

    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        return self._budget.needed(sizes, late_outputs=plan.late_outputs)

    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        kept = {"bounce pool": self._engine.bounce_bytes} | row_orders(self._tables)
        if cache is None:
            return kept
        purposes = cache.memory()
        purposes["window"] += held_bytes
        return purposes | kept


class DevicePlacement(Placement):
    """Lines in device memory and pinned host memory; features in device memory."""

    least_planned = 3  # one is read, one is gathered, one is with the consumer
    option = "device_memory"

    def __init__(
        self,
        device: cuda.Device,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        *,
        memory_bytes: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.device, self._engine, self._tables = device, engine, tables
        self._options, self._dtype = options, dtype
        host_cache_bytes = 0 if options.memory is None else options.memory - options.staging
        own = f"cuda:{device.index}"
        self.memories = frozenset({own, "host"} if host_cache_bytes else {own})
        buffers = 1 if options.wait == "warp" else COPY_BUFFERS if options.transfer == "copy" else 0
        self._budget: DeviceBudget = DeviceBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=buffers * options.staging // options.rounds,
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
            host_cache_bytes=host_cache_bytes,
        )

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        options = self._options
        with ExitStack() as stack:
            reader = None
            if any(plan.lines.values()) and heats and not options.check_crc:
                paths = [shard for t in self._tables for shard in t.shards]
                reader = open_extent_reader(self.device, self._engine, paths)
                stack.callback(reader.close)
            return DeviceFeatureCache(
                self.device,
                self._engine,
                self._tables,
                lines=plan.lines,
                host_lines=plan.host_lines,
                heats=heats,
                policy=options.policy,
                host_policy=options.host_policy,
                output_dtype=self._dtype,
                check_crc=options.check_crc,
                wait=options.wait,
                transfer=options.transfer,
                staging_bytes=options.staging,
                rounds_max=options.rounds,
                pairs=options.pairs or self._usual_pairs(),
                reader=reader,
            )

    def _usual_pairs(self) -> int:
        """A thread serves a pair, and one thread is enough for two SSDs."""
        disks = disk_count(shard for t in self._tables for shard in t.shard_paths)
        return max(1, min(disks // 2, self._options.rounds))

    def _needed(self, sizes: Sizes, plan: MemoryPlan) -> dict[str, int]:
        return self._budget.needed(sizes)

    def memory(self, cache: Cache | None, held_bytes: int) -> dict[str, int]:
        if cache is None:
            return {}
        return cache.memory() | {"minibatches": held_bytes}


_WASTED = 2
"""Pages are mostly wasted if a minibatch reads more than this number of times the bytes of its rows."""


def memory_line(tables: Sequence[Table], placement: Placement, wanted: Sizes, plan: MemoryPlan) -> str:
    """wanted: the sizes that the user asked for. plan: how memory is shared out."""
    purposes = {name: n for name, n in plan.purposes.items() if n}
    lines = purposes.pop("lines", 0)
    of_all = 100 * lines / max(1, sum(t.page_count * t.page_bytes for t in tables))
    parts = [f"{format_bytes(lines)} for the cache ({of_all:.1f} % of the tables)"]
    for name, n in sorted(purposes.items(), key=lambda item: -item[1]):
        counted = {"window": f"a window of {plan.sizes.window_batches} minibatches"}
        parts.append(f"{format_bytes(n)} for {counted.get(name, name)}")
    said = f"memory of {format_bytes(placement.memory_bytes)}: {', '.join(parts)}"
    advice = _what_helps(tables, placement, wanted, plan)
    return f"{said}. {advice}" if advice else said


def _what_helps(tables: Sequence[Table], placement: Placement, wanted: Sizes, plan: MemoryPlan) -> str:
    if plan.capped:
        return ""
    table = max(tables, key=lambda t: wanted.rows[t.name] * t.row_bytes)
    row_bytes = sum(wanted.rows[t.name] * t.row_bytes for t in tables)
    least_page = 512 * -(-table.row_bytes // 512)
    if wanted.page_bytes > _WASTED * row_bytes and table.page_bytes >= _WASTED * least_page:
        return (
            f"Most of each page is not needed: {table.name!r} has rows of {table.row_bytes} B in pages of "
            f"{table.page_bytes} B; convert with --page-bytes {least_page}"
        )
    held = plan.sizes

    def as_wanted(other: MemoryPlan) -> bool:
        return other.sizes.window_batches == wanted.window_batches and not other.late_outputs

    if not as_wanted(plan):
        shortened = (
            f"the window of {wanted.window_batches} minibatches was shortened to {held.window_batches}"
        )
        late = "pages without a line are read only when a minibatch is due"
        said = [shortened] * (held.window_batches < wanted.window_batches) + [late] * plan.late_outputs
        needed = _memory_for(placement, wanted, as_wanted)
        return f"Memory is short: {' and '.join(said)}; {placement.option}={needed} would avoid that"
    needed = _memory_for(placement, wanted, lambda other: other.capped)
    return f"{placement.option}={needed} would hold all features: then nothing is read twice"


def _memory_for(placement: Placement, wanted: Sizes, enough: Callable[[MemoryPlan], bool]) -> str:
    """The least memory that is enough, to about 1 %."""
    low = high = placement.memory_bytes
    while not enough(placement.share(wanted, high)):
        low, high = high, 2 * high
    for _ in range(7):  # to a hundredth
        middle = (low + high) // 2
        if enough(placement.share(wanted, middle)):
            high = middle
        else:
            low = middle
    return advised_bytes(high)
