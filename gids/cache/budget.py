"""The memory budget: one number for everything, divided before anything is allocated.

Called by the loader's placement once it knows how large minibatches are. Chooses the length of the window,
how many minibatches are planned, and what is left for lines. It knows sizes only.
"""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gids import _core
from gids.cache.output_dtype import output_bytes
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes, memory_groups

if TYPE_CHECKING:
    from gids.store import Table

GROWTH = 1.25
"""Memory is reserved for minibatches larger than the first by this factor."""

REACH = 3
"""A window is useful while its minibatches read at most about three times what the lines hold.

Measured by `gids bench hit-ratio` on graphs with power-law degrees: a longer window adds about one point.
"""

SMALL = 16
"""More minibatches are planned while all outputs take at most a sixteenth of the memory."""


@dataclass(frozen=True)
class Sizes:
    """The size of a minibatch, and how many minibatches are held at once.

    rows: rows that one minibatch reads, by table. page_bytes: bytes of the pages that hold these rows.
    minibatch_bytes: memory of the sampled minibatch itself. window_batches: minibatches in the window.
    planned_batches: minibatches planned at once; at least least_planned_batches where memory is short, at
    most most_planned_batches. waiting_batches: sampled minibatches that wait for the window. source_bytes:
    memory of the sampler, as a function of waiting_batches. growth: room for minibatches that are larger by
    this factor.
    """

    rows: Mapping[str, int]
    page_bytes: int
    minibatch_bytes: int
    window_batches: int
    planned_batches: int
    most_planned_batches: int
    least_planned_batches: int = 1
    waiting_batches: int = 0
    source_bytes: Callable[[int], int] = lambda _waiting: 0
    growth: float = GROWTH

    @property
    def live_batches(self) -> int:
        """Minibatches in the window or planned."""
        return self.window_batches + self.planned_batches

    def grown(self, times: float) -> Sizes:
        """With minibatches that are larger by this factor."""
        return replace(
            self,
            rows={name: int(times * n) for name, n in self.rows.items()},
            page_bytes=int(times * self.page_bytes),
            minibatch_bytes=int(times * self.minibatch_bytes),
        )

    def with_planned(self, planned_batches: int) -> Sizes:
        """With another number of planned minibatches."""
        return replace(self, planned_batches=planned_batches)

    def shortened(self, window_batches: int) -> Sizes:
        """With a shorter window, which minibatches enter as soon as they are sampled: none wait."""
        return replace(self, window_batches=window_batches, waiting_batches=0)


@dataclass(frozen=True)
class MemoryPlan:
    """How memory is divided.

    purposes: bytes by purpose. lines: cache lines by table. sizes: the largest minibatch, the window and the
    planned minibatches that fit. capped: more memory would not add lines. line_bytes: bytes of all lines.
    host_lines: of a plan for a device, the lines in host memory by table.
    """

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    sizes: Sizes
    capped: bool
    line_bytes: int
    host_lines: Mapping[str, int]

    @property
    def window_pays(self) -> bool:
        """Whether the window is worth its memory, which a shorter one would leave to the lines."""
        window, lines = self.purposes["window"], self.purposes["lines"]
        reach = self.sizes.window_batches * self.sizes.page_bytes
        return window <= lines and reach <= REACH * lines

    @property
    def pages_leave_lines(self) -> bool:
        """Whether the pages of planned minibatches take at most half of the lines, if there are lines."""
        needed = self.sizes.planned_batches * self.sizes.page_bytes
        return 2 * needed <= self.line_bytes or self.line_bytes == 0


_MERGED_BYTES = 32 << 10
"""Neighboring pages without a line are read into the bounce pool by one request of up to this size."""

_BOUNCE_SHARE = 64
"""The bounce pool takes at most 1/64 of the memory, but each of its requests holds at least one page."""

_MOST_BOUNCE_SHARE = 8
"""If it takes more than an eighth then, fewer requests are in flight."""

_NARROW_PAGES = 1 << 32
"""A minibatch keeps 4 bytes per page that it reads, or 8 bytes if the table has more pages than this."""

_MEMORY_PAGE = 4096

OTHERS = "other loaders"
"""The purpose of what other loaders of the source keep."""


def longest_read_bytes(tables: Iterable[Table], *, memory_bytes: int, queue_depth: int) -> int:
    """The max_read_bytes of a cache's engine. The bounce pool is this size times the queue depth.

    memory_bytes: the whole budget; a small one makes requests shorter.
    """
    merged = _MERGED_BYTES
    while merged > 512 and merged * queue_depth * _BOUNCE_SHARE > memory_bytes:
        merged //= 2
    return max([merged, *(t.page_bytes for t in tables)])


def affordable_depth(tables: Sequence[Table], queue_depth: int, memory_bytes: int) -> int:
    """The queue depth of that engine: at most queue_depth, and so much that its bounce pool takes at most an
    eighth of the memory; at least 2."""
    longest = longest_read_bytes(tables, memory_bytes=memory_bytes, queue_depth=queue_depth)
    return max(min(2, queue_depth), min(queue_depth, memory_bytes // _MOST_BOUNCE_SHARE // longest))


def bounce_pool_bytes(tables: Sequence[Table], queue_depth: int, memory_bytes: int) -> int:
    """Bytes of the bounce pool of that engine, before it is opened."""
    depth = affordable_depth(tables, queue_depth, memory_bytes)
    return depth * longest_read_bytes(tables, memory_bytes=memory_bytes, queue_depth=depth)


def row_orders(tables: Iterable[Table]) -> dict[str, int]:
    """The memory of orders that were read to compare their checksums. Others are mapped, and take none."""
    orders = [t.order for t in tables if t.order is not None and not isinstance(t.order, np.memmap)]
    return {"row orders": sum(order.nbytes for order in orders)} if orders else {}


@dataclass(frozen=True, kw_only=True)
class Budget(ABC):
    """The common part of both placements' budgets.

    output_row_bytes: bytes of a row as the loader returns it, by table. bounce_bytes: size of the bounce
    pool. memory_bytes: the limit of everything together. cache_bytes: the limit of the lines (0: no lines,
    None: no limit). Tables share the lines in proportion to their bytes on disk. others_bytes: what other
    loaders keep of memory_bytes. pinned: outputs are in pinned memory.
    """

    tables: Sequence[Table]
    output_row_bytes: Mapping[str, int]
    bounce_bytes: int
    memory_bytes: int
    cache_bytes: int | None
    others_bytes: int = 0
    pinned: bool = False

    option: ClassVar[str]
    """The argument of gids.open() that gives memory_bytes."""

    def share(self, sizes: Sizes) -> MemoryPlan:
        """Give every purpose its bytes; the rest becomes cache lines.

        sizes: of minibatches like the first one, with the preferred window and planned minibatches. There is
        room for minibatches that are larger by sizes.growth. More minibatches are planned while their outputs
        are small beside the whole. Where memory is short, the window is shortened first. Then fewer
        minibatches are planned, until the lines take as much as the outputs. If that does not fit, no room is
        left for larger minibatches. More are planned than sizes.planned_batches only if their pages, which
        keep their lines meanwhile, take at most half of the lines.

        Raises MemoryBudgetError, which lists the sum, if one minibatch does not fit.
        """
        usual, plan = self._more_planned(sizes.grown(sizes.growth)), None
        for planned in range(usual.planned_batches, sizes.least_planned_batches - 1, -1):
            plan = self._with_window(usual.with_planned(planned)) or plan
            if planned > sizes.planned_batches and (plan is None or not plan.pages_leave_lines):
                continue
            if plan is not None and (plan.capped or plan.line_bytes >= plan.purposes["outputs"]):
                return plan
        least = sizes.with_planned(sizes.least_planned_batches)
        if (plan := plan or self._with_window(least)) is None:
            raise too_little(self.memory_bytes, self.needed(least.shortened(0)), self.option)
        return plan

    def enough_for_lines(self, sizes: Sizes, line_bytes: int) -> str:
        """The memory_bytes to advise so that such minibatches leave so many bytes to the lines."""
        needed = self.needed(sizes.grown(sizes.growth).shortened(min(1, sizes.window_batches)))
        beside = line_bytes // 16  # what lines need beside their pages, at most
        return enough(self.memory_bytes, needed | {"lines": line_bytes + beside})

    @abstractmethod
    def needed(self, sizes: Sizes) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need, without lines."""

    @abstractmethod
    def _divide(self, left: int, purposes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """(lines, lines in host memory beside a device's) by table, for these bytes. Adds to purposes what
        lines need beside their pages."""

    def _plan(self, sizes: Sizes) -> MemoryPlan | None:
        """The plan for minibatches and a window of these sizes; None if they do not fit."""
        purposes = self.needed(sizes)
        left = self.memory_bytes - _sum(purposes)
        if left < 0:
            return None
        capped = self.cache_bytes is not None and left > self.cache_bytes
        if self.cache_bytes is not None:
            left = min(left, self.cache_bytes)
        lines, host_lines = self._divide(left, purposes)
        purposes["lines"] = sum(lines[t.name] * t.page_bytes for t in self.tables)
        all_held = all(lines[t.name] == t.page_count for t in self.tables)
        on_host = sum(host_lines.get(t.name, 0) * t.page_bytes for t in self.tables)
        line_bytes = purposes["lines"] + on_host
        return MemoryPlan(purposes, lines, sizes, capped or all_held, line_bytes, host_lines)

    def _with_window(self, sizes: Sizes) -> MemoryPlan | None:
        """The plan with the longest window that pays."""
        shorter = range(sizes.window_batches, -1, -1)
        for tried in (sizes, *map(sizes.shortened, shorter)):
            plan = self._plan(tried)
            if plan is not None and (tried.window_batches <= 1 or plan.capped or plan.window_pays):
                return plan
        return None

    def _output_bytes(self, sizes: Sizes) -> int:
        """Bytes of one minibatch's rows."""
        sizes_bytes = (sizes.rows[t.name] * self.output_row_bytes[t.name] for t in self.tables)
        return sum(output_bytes(n, pinned=self.pinned) for n in sizes_bytes)

    def _more_planned(self, sizes: Sizes) -> Sizes:
        """With as many planned minibatches as keep their outputs small beside the whole."""
        affordable = self.memory_bytes // SMALL // max(1, self._output_bytes(sizes)) - 1
        return sizes.with_planned(max(sizes.planned_batches, min(sizes.most_planned_batches, affordable)))

    def _lines(self, nbytes: int, metadata_bytes: int) -> dict[str, int]:
        """Lines by table. metadata_bytes: of each line, beside its page."""
        total = sum(t.page_count * t.page_bytes for t in self.tables) or 1
        lines = {}
        for t in self.tables:
            share = nbytes * (t.page_count * t.page_bytes) // total
            lines[t.name] = min(t.page_count, share // (t.page_bytes + metadata_bytes), _core.MAX_LINES)
        return lines


class HostBudget(Budget):
    """Divides host memory."""

    option = "memory"

    def needed(self, sizes: Sizes) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need, without lines.

        outputs: one that the consumer holds, and one per planned minibatch. window: minibatches in the
        window, planned or waiting, and the numbers of their pages. requests: the reads of planned
        minibatches, and memory to plan in.
        """
        tables, rows = self.tables, sum(sizes.rows.values())
        pages = sum(sizes.rows[t.name] * (4 if t.page_count <= _NARROW_PAGES else 8) for t in tables)
        ordered = sum(sizes.rows[t.name] for t in tables if t.order is not None) * sizes.planned_batches
        sampled = sizes.live_batches + sizes.waiting_batches
        return {
            "page tables": sum(8 * t.page_count + _core.LISTS_BYTES for t in tables),
            "bounce pool": self.bounce_bytes,
            "outputs": self._output_bytes(sizes) * (sizes.planned_batches + 1),
            "window": pages * sizes.live_batches + sizes.minibatch_bytes * sampled,
            "requests": rows * sizes.planned_batches * _core.PLANNED_ROW_BYTES
            + rows * _core.PLANNING_ROW_BYTES
            + 8 * ordered
            + _MEMORY_PAGE * len(tables),
            "sampler": sizes.source_bytes(sizes.waiting_batches),
            **row_orders(tables),
            **({OTHERS: self.others_bytes} if self.others_bytes else {}),
        }

    def _divide(self, left: int, purposes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        lines = self._lines(left, _core.LINE_METADATA_BYTES)
        purposes["line metadata"] = _sum(lines) * _core.LINE_METADATA_BYTES
        return lines, {}


def too_little(memory_bytes: int, purposes: Mapping[str, int], option: str) -> MemoryBudgetError:
    """The error for minibatches that do not fit.

    purposes: the least bytes that they need. option: the argument of gids.open() for this memory.
    """
    needed = _sum(purposes)
    listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
    return MemoryBudgetError(
        f"{option}={memory_bytes} ({format_bytes(memory_bytes)}) is too small: minibatches of this size "
        f"need {listing} = {needed} bytes ({format_bytes(needed)}) without any cache. Give "
        f"{option}={enough(memory_bytes, purposes)} or more, or use smaller minibatches."
    )


def enough(memory_bytes: int, purposes: Mapping[str, int]) -> str:
    """The memory_bytes to advise for these purposes, in place of this one."""
    needed, pool = _sum(purposes), purposes.get("bounce pool", 0)
    if pool * (_MOST_BOUNCE_SHARE + 4) > memory_bytes:  # its limit, which grows with the memory
        needed = max(needed, (needed - pool) * _MOST_BOUNCE_SHARE // (_MOST_BOUNCE_SHARE - 1))
    return advised_bytes(needed)


def advised_bytes(needed: int) -> str:
    """The memory_bytes to advise for this need, rounded up to three digits: 524_000_000."""
    enough = needed * (_BOUNCE_SHARE + 2) // _BOUNCE_SHARE  # a larger budget may have a larger bounce pool
    unit = 10 ** max(0, len(str(enough)) - 3)
    return f"{-(-enough // unit) * unit:_}"


def _sum(by_name: Mapping[str, int]) -> int:
    return sum(by_name.values())


def available_bytes(processes: int = 1) -> int:
    """Memory that this process may still use: the machine's, its control group's, or by `ulimit -v` or `-d`.

    The least of them. So many processes share the first two. Pages of files in memory count as available, as
    they can be dropped.
    """
    with open("/proc/meminfo") as f:
        meminfo = dict(line.split(":") for line in f)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for group, limit_name, usage_name in memory_groups():
        try:
            limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
        except OSError:
            continue  # the root has no limit file; a container sees only its own part of the tree
        if limit != "max":
            available = min(available, max(0, int(limit) - max(0, usage - _file_bytes(group))))
    available //= processes
    with open("/proc/self/status") as f:
        status = dict(line.split(":", 1) for line in f)
    for kind, usage_name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            available = min(available, max(0, soft - int(status[usage_name].split()[0]) * 1024))
    return available


def _file_bytes(group: Path) -> int:
    """Bytes of pages of files, without shared memory, that count as usage of a group and those below it."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in stat else ""  # of version 1
    return sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
