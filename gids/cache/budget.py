"""The memory budget: one number for everything, shared out before anything is allocated.

Called by the loader once it knows how large minibatches are. Knows sizes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from gids import _core
from gids.cache.live_batches import Sizes, Way, best_share
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

SMALL = 16
"""Outputs of further planned minibatches are reserved while all of them take a sixteenth of the memory."""

SCARCE = 1 / 12
"""Lines of a quarter of one of three outputs. With less, minibatches get outputs when they are gathered."""

_MERGED_BYTES = 32 << 10
"""Neighbouring pages without a line become one request of so much, read into the bounce pool."""

_BOUNCE_SHARE = 64
"""Part of the memory that the bounce pool takes at most, as long as its requests hold a page."""

_NARROW_PAGES = 1 << 32
"""A minibatch keeps 4 bytes for each of its pages, and 8 in a table of more pages than this."""

_MEMORY_PAGE = 4096


class TableShape(Protocol):
    """What the budget needs to know of a table."""

    @property
    def name(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def page_count(self) -> int: ...
    @property
    def order(self) -> npt.NDArray[Any] | None: ...


@dataclass(frozen=True)
class MemoryPlan:
    """How memory is shared out.

    purposes: bytes by purpose. lines: of each table. sizes: what there is room for: the largest minibatch,
    the window, the minibatches planned at once. capped: more memory would not give more lines.
    late_outputs: minibatches get their outputs when they are gathered, and not when they are planned.
    """

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    sizes: Sizes
    capped: bool
    late_outputs: bool


def longest_read_bytes(
    tables: Iterable[TableShape], *, memory_bytes: int | None = None, queue_depth: int = 0
) -> int:
    """What the engine of a cache must hold: its max_read_bytes, which sizes the bounce pool.

    memory_bytes: for everything; with little of it requests are shorter. None: not known.
    """
    merged = _MERGED_BYTES
    while memory_bytes is not None and merged > 512 and merged * queue_depth * _BOUNCE_SHARE > memory_bytes:
        merged //= 2
    return max([merged, *(t.page_bytes for t in tables)])


def bounce_pool_bytes(
    tables: Iterable[TableShape], queue_depth: int, *, memory_bytes: int | None = None
) -> int:
    """What the bounce pool of such an engine takes, before there is one."""
    return queue_depth * longest_read_bytes(tables, memory_bytes=memory_bytes, queue_depth=queue_depth)


def needed_bytes(
    tables: Sequence[TableShape],
    sizes: Sizes,
    *,
    output_row_bytes: Mapping[str, int],
    bounce_bytes: int,
    late_outputs: bool = False,
) -> dict[str, int]:
    """What minibatches of these sizes take by purpose, before the first line. Arguments as of share_memory.

    outputs: one with the consumer, and one for each planned minibatch, or, where they are late, for the one
    that is gathered. window: minibatches in the window or planned, and the numbers of their pages. requests:
    what planned minibatches read, and memory to plan in.
    """
    rows = sum(sizes.rows.values())
    pages = sum(sizes.rows[t.name] * (4 if t.page_count <= _NARROW_PAGES else 8) for t in tables)
    outputs = 2 if late_outputs else sizes.planned_batches + 1
    requested = min(rows, _core.LATE_ROWS) if late_outputs else rows * sizes.planned_batches
    ordered = sum(sizes.rows[t.name] for t in tables if t.order is not None) * sizes.planned_batches
    sampled = sizes.live_batches + sizes.waiting_batches
    return {
        "page tables": sum(8 * t.page_count + _core.LISTS_BYTES for t in tables),
        "bounce pool": bounce_bytes,
        "outputs": output_bytes(tables, sizes.rows, output_row_bytes) * outputs,
        "window": pages * sizes.live_batches + sizes.minibatch_bytes * sampled,
        "requests": requested * _core.PLANNED_ROW_BYTES + rows * _core.PLANNING_ROW_BYTES + 8 * ordered,
    }


def output_bytes(
    tables: Sequence[TableShape], rows: Mapping[str, int], output_row_bytes: Mapping[str, int]
) -> int:
    """Bytes of the rows that one minibatch is handed, in whole memory pages."""
    found = (rows[t.name] * output_row_bytes[t.name] for t in tables)
    return sum(_MEMORY_PAGE * max(1, -(-n // _MEMORY_PAGE)) for n in found)


def share_memory(
    tables: Sequence[TableShape],
    sizes: Sizes,
    *,
    memory_bytes: int,
    cache_bytes: int | None,
    output_row_bytes: Mapping[str, int],
    bounce_bytes: int,
) -> MemoryPlan:
    """Give every purpose its bytes; what is left becomes cache lines.

    sizes: of minibatches like the first, with the window and the planned minibatches that are wanted.
    output_row_bytes: of a row as it is handed out. cache_bytes caps the lines (0: none). Tables share the
    lines in proportion to their bytes on disk.

    More than planned_batches may be planned at once, up to the most, where outputs are small beside the
    whole. Where the lines would get little, in this order: less room for minibatches that are larger than
    the first; outputs only when minibatches are gathered; fewer planned. In each of these the window is as
    long as pays. Raises MemoryBudgetError, with the sum, when not even the least of them fits.
    """

    def needs(chosen: Sizes, late: bool) -> dict[str, int]:
        return needed_bytes(
            tables, chosen, output_row_bytes=output_row_bytes, bounce_bytes=bounce_bytes, late_outputs=late
        )

    def share(chosen: Sizes, late: bool) -> MemoryPlan | None:
        purposes = needs(chosen, late)
        left = memory_bytes - sum(purposes.values())
        if left < 0:
            return None
        purposes["sampler"] = min(left, chosen.source_bytes(chosen.waiting_batches))
        left -= purposes["sampler"]
        capped = cache_bytes is not None and left > cache_bytes
        if cache_bytes is not None:
            left = min(left, cache_bytes)
        if late:  # what wins a line is all that is read ahead, and most of it comes before the next plan
            most = min(sum(share_lines(tables, left, _core.LINE_METADATA_BYTES).values()), chosen.most_loads)
            loads = min(left, most * _core.LOAD_BYTES)
            purposes["requests"] += loads
            left -= loads
        lines = share_lines(tables, left, _core.LINE_METADATA_BYTES)
        purposes["lines"] = sum(lines[t.name] * t.page_bytes for t in tables)
        purposes["line metadata"] = sum(n * _core.LINE_METADATA_BYTES for n in lines.values())
        capped = capped or all(lines[t.name] == t.page_count for t in tables)
        return MemoryPlan(purposes, lines, chosen, capped, late)

    def early(chosen: Sizes) -> MemoryPlan | None:
        return share(chosen, False)

    def late(chosen: Sizes) -> MemoryPlan | None:
        return share(chosen, True)

    roomy, *rest = sizes.growths
    tight = rest or [roomy]
    output = output_bytes(tables, sizes.grown(roomy).rows, output_row_bytes)
    least = sizes.with_planned(sizes.least_planned_batches)
    more = affordable_planned(memory_bytes, output, sizes.planned_batches, sizes.most_planned_batches)
    ways = [
        Way(sizes.with_planned(more).grown(roomy), early, least_lines=1),
        Way(sizes.grown(tight[0]), early, least_lines=SCARCE),
        Way(sizes.grown(tight[0]), late),
        *(Way(least.grown(growth), late) for growth in tight),
        Way(least.grown(tight[-1]), early),
    ]
    if (best := best_share(ways)) is not None:
        return best
    smallest = least.shortened(0).grown(tight[-1])
    raise too_little(memory_bytes, min((needs(smallest, late) for late in (False, True)), key=_sum))


def affordable_planned(memory_bytes: int, output_bytes: int, least: int, most: int) -> int:
    """Minibatches that may be planned at once, so that further ones' outputs are small beside the whole."""
    return max(least, min(most, memory_bytes // SMALL // max(1, output_bytes) - 1))


def too_little(memory_bytes: int, purposes: Mapping[str, int]) -> MemoryBudgetError:
    """The error where minibatches need more. purposes: the least bytes that they need."""
    needed = _sum(purposes)
    listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
    return MemoryBudgetError(
        f"memory_bytes={memory_bytes} ({format_bytes(memory_bytes)}) is too small: minibatches of this size "
        f"need {listing} = {needed} bytes ({format_bytes(needed)}), without any cache. Give "
        f"memory_bytes={advised_bytes(needed)} or more, or use smaller minibatches."
    )


def advised_bytes(needed: int) -> str:
    """What to give as memory_bytes where so much is needed, in three digits: 524_000_000."""
    enough = needed * (_BOUNCE_SHARE + 2) // _BOUNCE_SHARE  # more memory may have a larger bounce pool
    unit = 10 ** max(0, len(str(enough)) - 3)
    return f"{-(-enough // unit) * unit:_}"


def _sum(purposes: Mapping[str, int]) -> int:
    return sum(purposes.values())


def share_lines(tables: Sequence[TableShape], memory_bytes: int, metadata_bytes: int) -> dict[str, int]:
    """Lines of each table, in proportion to the tables' bytes on disk. metadata_bytes: of each line."""
    total = sum(t.page_count * t.page_bytes for t in tables) or 1
    lines = {}
    for t in tables:
        share = memory_bytes * (t.page_count * t.page_bytes) // total
        lines[t.name] = min(t.page_count, share // (t.page_bytes + metadata_bytes), _core.MAX_LINES)
    return lines


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's when that is less."""
    with open("/proc/meminfo") as f:
        meminfo = dict(line.split(":") for line in f)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for group, limit_name, usage_name in _memory_groups():
        try:
            limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
        except OSError:
            continue  # the root has no limit file, and a container sees only its own part of the tree
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


def _memory_groups() -> Iterator[tuple[Path, str, str]]:
    """This process's control groups for memory and all above them: (directory, limit file, usage file)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root):
                yield group, *names
