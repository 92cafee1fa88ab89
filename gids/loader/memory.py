"""How a FeatureLoader's memory is shared out: sizes of minibatches, the placement of its cache, the log line.

The cache is in host memory, or on a CUDA device with more lines in host memory. Called by FeatureLoader,
which borrows the memory. The stream decides when steps enter, are planned and gathered.
"""

from __future__ import annotations

import logging
import math
import weakref
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
from gids.cache.budget import Sizes, advised_bytes, row_orders
from gids.cache.device import DeviceBudget, DeviceFeatureCache
from gids.cache.device.reads import COPY_BUFFERS
from gids.cache.output_dtype import out_row_bytes
from gids.cuda import on_host
from gids.errors import MemoryBudgetError, MissingError
from gids.io.device.kvikio_reader import open_extent_reader
from gids.io.disks import disk_count
from gids.loader.options import MAX_PLANNED
from gids.loader.rows import Cache, EpochInput, Ids
from gids.loader.stats import is_size
from gids.sizes import format_bytes
from gids.store.table import positions_of

if TYPE_CHECKING:
    from gids.cache.budget import Budget
    from gids.io import Engine
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
    """Where the cache of a FeatureLoader is. Shares memory out, and builds the cache, at the first minibatch.

    expected: rows of the largest minibatch, by the user, or None.

    Attributes: cache, and plan: how memory is shared out; None before the first minibatch. end: closes the
    cache. window: minibatches sampled ahead. planned: that are read at once. waiting: sampled ones that are
    not in the window yet. minibatch_bytes: memory of the largest sampled one so far.
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
        budget: Budget,
        dtype: torch.dtype | None,
        expected: Rows | None,
    ) -> None:
        self._engine, self.tables, self._options, self._dtype = engine, tables, options, dtype
        self._budget, self.expected = budget, expected
        self.cache: Cache | None = None
        self.plan: MemoryPlan | None = None
        self.end = ExitStack()
        self.minibatch_bytes = 0
        self._had_cache: Callable[[], EpochInput[Any] | None] = lambda: None  # the last epoch
        self._seen: Rows = {}  # the most that a minibatch read so far
        self._checked: Rows = {}  # of a minibatch for which there was room
        self._warned = False
        self._counted: dict[str, dict[str, Any]] = {}  # by caches that were released
        self._adapted_to = (0, 0)  # steps and misses, when the number of planned minibatches adapted last
        self._forget_plan()

    def _forget_plan(self) -> None:
        """Use the window and the planned minibatches that the user wants, until memory is shared out."""
        options = self._options
        most = min(MAX_PLANNED, _core.USE_BITS - options.window)
        self.window = options.window
        self._most_planned = options.planned or most  # lowered to what memory allows, once that is known
        self.planned = options.planned or min(self.least_planned, most)
        self._adapt_at = 0  # a step of the cache
        self.waiting = 0
        self._most_waiting: int | None = None  # once memory is shared out

    @property
    def option(self) -> str:
        """The argument of gids.open() that gives the budget."""
        return self._budget.option

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
        return (self.window + self.planned + self.waiting) * self.minibatch_bytes

    def allow_waiting(self, batches: int) -> None:
        """So many sampled minibatches may wait to enter the window, if memory allows."""
        self.waiting = batches if self._most_waiting is None else min(batches, self._most_waiting)

    def cache_for(
        self,
        epoch: EpochInput[Any],
        ids: Ids,
        minibatch_bytes: int,
        *,
        first: bool,
        build: Callable[[Sizes], None],
    ) -> Cache:
        """The cache for a minibatch. first: of a stream.

        build: calls build(), with the sizes of usual minibatches. The cache is built again if another one
        would have room for minibatches that are larger than expected.
        """
        rows = rows_read(ids, [t.name for t in self.tables])
        if self.on_host:  # on a device the cache copies the ids
            minibatch_bytes = max(minibatch_bytes, 8 * sum(rows.values()))
        largest_bytes = max(self.minibatch_bytes, minibatch_bytes)
        grew = largest_bytes > self.minibatch_bytes or any(
            n > self._checked.get(name, -1) for name, n in rows.items()
        )
        if self.cache is not None and (first or grew):
            self._checked = rows
            sizes = self._sizes(epoch, rows, largest_bytes)
            if first and self._too_small(sizes, epoch):
                self.release()
                self.waiting = epoch.waiting_batches
            else:
                self._keep_within_memory(sizes, epoch)
        if self.cache is None:
            sizes = self._sizes(epoch, rows, minibatch_bytes, ids)
            try:
                build(self._usual(sizes, epoch))
            except MemoryBudgetError:
                if not self._seen:
                    raise
                # No cache has room for the largest one, which was warned of.
                self._build_for_less(sizes, epoch, build)
        assert self.cache is not None
        self._had_cache = weakref.ref(epoch)
        # Not before: a minibatch that does not fit does not count.
        self._seen, self.minibatch_bytes = larger(rows, self._seen), largest_bytes
        return self.cache

    def _build_for_less(self, sizes: Sizes, epoch: EpochInput[Any], build: Callable[[Sizes], None]) -> None:
        """Build a cache that has no room for the largest minibatch so far.

        It has room for minibatches like this one. If that does not fit either, and this epoch's cache was
        freed for packs, it gets the same sizes as that cache.
        """
        try:
            build(usual_sizes(sizes, largest=self.expected, growth=epoch.growth, seen={}))
        except MemoryBudgetError:
            if self._had_cache() is not epoch or self.plan is None:
                raise
            build(replace(self.plan.sizes, growths=(1.0,)))
            self._keep_within_memory(sizes, epoch)

    def check_beside_packs(self, ids: Ids, room: Rows) -> None:
        """Warn if a minibatch that is read beside packs has more rows than these have room for."""
        rows = rows_read(ids, room)
        more = {name: max(0, n - room[name]) for name, n in rows.items()}
        excess = sum(n * self._budget.output_row_bytes[name] for name, n in more.items())
        if excess and not self._warned:
            self._warned = True
            log.warning(too_large(rows, excess, in_time=False))

    def build(self, sizes: Sizes, heats: Heats) -> None:
        """Share memory out, and build the cache.

        sizes: of minibatches like the first one, with the window and planned minibatches that the user wants.
        Raises MemoryBudgetError, which lists the sum, if one minibatch does not fit.
        """
        self.plan = plan = self._budget.share(sizes)
        self.cache = cache = self._cache(plan, heats)
        self.end.callback(cache.close)
        self.window, self._most_planned = plan.sizes.window_batches, plan.sizes.planned_batches
        self.planned = min(self.planned, self._most_planned)
        self.waiting = self._most_waiting = plan.sizes.waiting_batches

    def release(self) -> None:
        """Free the cache, if there is one. Its counters stay."""
        if self.cache is not None:
            self._counted = self.table_stats()
            self.cache = None
            self.end.close()
            self._forget_plan()

    def share(self, sizes: Sizes, memory_bytes: int) -> MemoryPlan:
        """The plan for another budget. Raises like build()."""
        return replace(self._budget, memory_bytes=memory_bytes).share(sizes)

    def lines_for(self, epoch: EpochInput[Any], ids: Ids, minibatch_bytes: int) -> Mapping[str, int] | None:
        """Lines by table of the cache that minibatches like this one would get; None if they do not fit."""
        rows = rows_read(ids, [t.name for t in self.tables])
        sizes = self._sizes(epoch, rows, max(minibatch_bytes, 8 * sum(rows.values())), ids)
        try:
            plan = self._budget.share(self._usual(sizes, epoch))
        except MemoryBudgetError:
            return None
        return {name: count + plan.host_lines.get(name, 0) for name, count in plan.lines.items()}

    def planned_now(self) -> int:
        """Minibatches to plan ahead. On the CPU they adapt within an epoch too, by counts that repeat."""
        if self.on_host and self.cache is not None and self.cache.next_step >= self._adapt_at:
            self.adapt_planned()
        return self.planned

    def adapt_planned(self) -> None:
        """Plan the fewest minibatches whose missing pages cover twice the queue, as in the last ones."""
        if self._options.planned is not None or self.cache is None:
            return
        tables = self.table_stats().values()
        steps = max(t["steps"] for t in tables)
        misses = sum(t["misses"] for t in tables)
        new_steps, new_misses = steps - self._adapted_to[0], misses - self._adapted_to[1]
        self._adapted_to = (steps, misses)
        self._adapt_at = self.cache.next_step + _ADAPT_STEPS
        if new_steps == 0:
            return
        wanted = math.ceil(2 * self._engine.depth * new_steps / max(1, new_misses))
        self.planned = min(max(self.least_planned, wanted), self._most_planned)

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
    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache: ...

    def _sizes(
        self, epoch: EpochInput[Any], rows: Rows, minibatch_bytes: int, ids: Ids | None = None
    ) -> Sizes:
        """Of a minibatch. ids: its own, if the bytes of its pages matter."""
        return Sizes(
            rows=rows,
            page_bytes=0 if ids is None else page_bytes_read(ids, self.tables),
            minibatch_bytes=minibatch_bytes,
            window_batches=self.window,
            planned_batches=self.planned,
            most_planned_batches=self._most_planned,
            least_planned_batches=self._options.planned or 1,
            waiting_batches=self.waiting,
            source_bytes=epoch.source_bytes,
        )

    def _usual(self, sizes: Sizes, epoch: EpochInput[Any]) -> Sizes:
        """Of usual minibatches, given one."""
        usual = usual_sizes(sizes, largest=self.expected, growth=epoch.growth, seen=self._seen)
        return replace(usual, minibatch_bytes=max(usual.minibatch_bytes, self.minibatch_bytes))

    def _excess_bytes(self, sizes: Sizes) -> int:
        """Bytes beyond the budget that minibatches of these sizes need beside the existing lines; 0 or less
        if they fit."""
        assert self.plan is not None
        needed = self._budget.needed(replace(sizes, late_outputs=self.plan.sizes.late_outputs))
        return sum({**self.plan.purposes, **needed}.values()) - self.memory_bytes

    def _too_small(self, sizes: Sizes, epoch: EpochInput[Any]) -> bool:
        """Whether the cache has no room for minibatches as large as those before, or as the user expects, and
        another one would have.

        sizes: of the first minibatch of an epoch.
        """
        rows = larger(larger(sizes.rows, self._seen), self.expected or {})
        return self._excess_bytes(replace(sizes, rows=rows)) > 0 and self._fits(sizes, epoch)

    def _fits(self, sizes: Sizes, epoch: EpochInput[Any]) -> bool:
        """Whether a cache can leave room for minibatches of these sizes, and for those before."""
        try:
            self._budget.share(self._usual(sizes, epoch))
        except MemoryBudgetError:
            return False
        return True

    def _keep_within_memory(self, sizes: Sizes, epoch: EpochInput[Any]) -> None:
        """Plan fewer minibatches at once from now on if these sizes need it. Warn if that is not enough."""

        def excess_bytes(planned: int) -> int:
            return self._excess_bytes(sizes.with_planned(planned))

        least = self._options.planned or self.least_planned
        while self._most_planned > least and excess_bytes(self._most_planned) > 0:
            self._most_planned -= 1
        self.planned = min(self.planned, self._most_planned)
        if not self._warned and (excess := excess_bytes(self.planned)) > 0:
            self._warned = True
            log.warning(too_large(sizes.rows, excess, in_time=self._fits(sizes, epoch)))


class HostPlacement(Placement):
    """Lines and features in host memory."""

    least_planned = 2
    memories = frozenset({"host"})
    keep = False
    """Whether pages of heat 255 keep their lines for good."""

    _budget: HostBudget

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        memory_bytes: int,
        dtype: torch.dtype | None,
        expected: Rows | None,
    ) -> None:
        budget = HostBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=engine.bounce_bytes,
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
        )
        super().__init__(engine, tables, options, budget, dtype, expected)

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
            late_outputs=plan.sizes.late_outputs,
            output_dtype=self._dtype,
        )

    def memory(self) -> dict[str, int]:
        kept = {"bounce pool": self._engine.bounce_bytes} | row_orders(self.tables)
        if self.cache is None:
            return kept
        purposes = self.cache.memory()
        purposes["window"] += self.held_bytes
        return purposes | kept


def request_queue_bytes(options: Options, tables: Sequence[Table]) -> int:
    """Device memory of the request queue, and of the buffers for rounds of its reads."""
    slots = options.staging // max(t.page_bytes for t in tables)
    buffers = 1 if options.wait == "warp" else COPY_BUFFERS if options.transfer == "copy" else 0
    return 8 * slots + buffers * (options.staging + 8 * slots) // options.rounds


class DevicePlacement(Placement):
    """Lines in device memory and pinned host memory; features in device memory."""

    least_planned = 3  # one is read, one is gathered, one is with the consumer
    on_host = False
    _budget: DeviceBudget

    def __init__(
        self,
        device: cuda.Device,
        engine: Engine,
        tables: Sequence[Table],
        options: Options,
        memory_bytes: int,
        dtype: torch.dtype | None,
        expected: Rows | None,
    ) -> None:
        self.device = device
        host_cache_bytes = 0 if options.memory is None else options.memory - options.staging
        own = f"cuda:{device.index}"
        self.memories = frozenset({own, "host"} if host_cache_bytes else {own})
        budget = DeviceBudget(
            tables=tables,
            output_row_bytes={t.name: out_row_bytes(t, dtype) for t in tables},
            bounce_bytes=request_queue_bytes(options, tables),
            memory_bytes=memory_bytes,
            cache_bytes=options.cache,
            host_cache_bytes=host_cache_bytes,
        )
        super().__init__(engine, tables, options, budget, dtype, expected)

    def _cache(self, plan: MemoryPlan, heats: Heats) -> Cache:
        options = self._options
        with ExitStack() as stack:
            reader = None
            if any(plan.lines.values()) and heats and not options.check_crc:
                paths = [shard for t in self.tables for shard in t.shards]
                reader = open_extent_reader(self.device, self._engine, paths)
                stack.callback(reader.close)
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
                wait=options.wait,
                transfer=options.transfer,
                staging_bytes=options.staging,
                rounds_max=options.rounds,
                pairs=options.pairs or self._usual_pairs(),
                reader=reader,
            )

    def _usual_pairs(self) -> int:
        """A thread serves a pair, and one thread is enough for two SSDs."""
        disks = disk_count(shard for t in self.tables for shard in t.shard_paths)
        return max(1, min(disks // 2, self._options.rounds))

    def memory(self) -> dict[str, int]:
        return {} if self.cache is None else self.cache.memory() | {"minibatches": self.held_bytes}


_MOST_MEMORY_BYTES = 1 << 50
"""More is not advised."""

_WASTED = 2
"""Pages are mostly wasted if a minibatch reads more than this number of times the bytes of its rows."""


def memory_line(placement: Placement, wanted: Sizes) -> str:
    """How memory is shared out. wanted: the sizes that the user asked for."""
    plan, tables = placement.plan, placement.tables
    assert plan is not None
    purposes = {name: n for name, n in plan.purposes.items() if n}
    lines = purposes.pop("lines", 0)
    of_all = 100 * lines / max(1, sum(t.page_count * t.page_bytes for t in tables))
    parts = [f"{format_bytes(lines)} for the cache ({of_all:.1f} % of the tables)"]
    for name, n in sorted(purposes.items(), key=lambda item: -item[1]):
        counted = {"window": f"a window of {plan.sizes.window_batches} minibatches"}
        parts.append(f"{format_bytes(n)} for {counted.get(name, name)}")
    said = f"memory of {format_bytes(placement.memory_bytes)}: {', '.join(parts)}"
    advice = _what_helps(placement, wanted, plan)
    return f"{said}. {advice}" if advice else said


def few_lines(placement: Placement, wanted: Sizes) -> str:
    """The warning about lines for less than half of a minibatch's pages; "" if there are more, or if cache=
    does not allow more."""
    plan, needed = placement.plan, wanted.page_bytes // 2
    assert plan is not None
    if plan.capped or _line_bytes(placement, plan) >= needed:
        return ""
    pool = placement.memory().get("bounce pool", 0)

    def is_enough(nbytes: int) -> bool:
        grown = max(0, nbytes // 8 - pool)  # which the bounce pool takes more at most
        try:
            return _line_bytes(placement, placement.share(wanted, nbytes - grown)) >= needed
        except MemoryBudgetError:
            return False

    enough = advised_bytes(least_memory(placement.memory_bytes, is_enough))
    lines, pages = format_bytes(_line_bytes(placement, plan)), format_bytes(wanted.page_bytes)
    return (
        f"{placement.option}={placement.memory_bytes} leaves {lines} for the cache, and a minibatch reads "
        f"pages of {pages}: most pages are read again for each minibatch. Give {placement.option}={enough} "
        "or more, or use smaller minibatches"
    )


def _line_bytes(placement: Placement, plan: MemoryPlan) -> int:
    """Of all lines, on the device and on the host."""
    count = {t.name: plan.lines[t.name] + plan.host_lines.get(t.name, 0) for t in placement.tables}
    return sum(count[t.name] * t.page_bytes for t in placement.tables)


def _what_helps(placement: Placement, wanted: Sizes, plan: MemoryPlan) -> str:
    if plan.capped:
        return ""
    tables = placement.tables
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
        same_window = other.sizes.window_batches == wanted.window_batches
        return same_window and other.sizes.late_outputs == wanted.late_outputs

    if not as_wanted(plan):
        shortened = (
            f"the window of {wanted.window_batches} minibatches was shortened to {held.window_batches}"
        )
        late = "pages without a line are read only when a minibatch is due"
        said = [shortened] * (held.window_batches < wanted.window_batches) + [late] * plan.sizes.late_outputs
        needed = _memory_for(placement, wanted, as_wanted)
        return f"Memory is short: {' and '.join(said)}; {placement.option}={needed} would avoid that"
    needed = _memory_for(placement, wanted, lambda other: other.capped)
    return f"{placement.option}={needed} would hold all features: then nothing is read twice"


def _memory_for(placement: Placement, wanted: Sizes, enough: Callable[[MemoryPlan], bool]) -> str:
    """The least memory that is enough, to about 1 %."""
    least = least_memory(placement.memory_bytes, lambda nbytes: enough(placement.share(wanted, nbytes)))
    return advised_bytes(least)


def least_memory(too_few_bytes: int, enough: Callable[[int], bool]) -> int:
    """The least number of bytes that is enough, to about 1 %; 0: no number is.

    too_few_bytes: that are not enough.
    """
    low = high = max(1, too_few_bytes)  # others may keep more than all memory
    while not enough(high):
        low, high = high, 2 * high
        if high > _MOST_MEMORY_BYTES:
            return 0
    for _ in range(7):  # to a hundredth
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
