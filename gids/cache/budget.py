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
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

GROWTH = 1.25
"""How much larger than the first minibatch a later one is expected to get."""

SMALL = 16
"""Outputs of further planned minibatches are reserved while all of them take a sixteenth of the memory."""


_MERGED_BYTES = 32 << 10
"""Neighbouring pages without a line become one request of so much, read into the bounce pool."""


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
    """Bytes by purpose, and the lines that each table gets."""

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    most_planned_batches: int
    """How many minibatches may be planned at once within the bytes of the outputs."""


def longest_read_bytes(tables: Iterable[TableShape]) -> int:
    """What the engine of a cache must hold: its max_read_bytes, which sizes the bounce pool."""
    return max([_MERGED_BYTES, *(t.page_bytes for t in tables)])


def bounce_pool_bytes(tables: Iterable[TableShape], queue_depth: int) -> int:
    """What the bounce pool of such an engine takes, before there is one."""
    return queue_depth * longest_read_bytes(tables)


def needed_bytes(
    tables: Sequence[TableShape],
    *,
    rows: Mapping[str, int],
    output_row_bytes: Mapping[str, int],
    window_batches: int,
    planned_batches: int,
    minibatch_bytes: int,
    waiting_batches: int,
    bounce_bytes: int,
) -> dict[str, int]:
    """What minibatches of this size take by purpose, before the first line. Arguments as of share_memory.

    Outputs: one per planned minibatch, one with the consumer, one between the two.
    """
    live = window_batches + planned_batches
    return {
        "page tables": sum(8 * t.page_count for t in tables),
        "bounce pool": bounce_bytes,
        "outputs": output_bytes(tables, rows, output_row_bytes) * (planned_batches + 2),
        "window": 16 * sum(rows.values()) * live + minibatch_bytes * (live + waiting_batches),
    }


def output_bytes(
    tables: Sequence[TableShape], rows: Mapping[str, int], output_row_bytes: Mapping[str, int]
) -> int:
    """Bytes of the rows that one minibatch is handed."""
    return sum(rows[t.name] * output_row_bytes[t.name] for t in tables)


def share_memory(
    tables: Sequence[TableShape],
    *,
    memory_bytes: int,
    cache_bytes: int | None,
    rows: Mapping[str, int],
    output_row_bytes: Mapping[str, int],
    window_batches: int,
    planned_batches: int,
    most_planned_batches: int,
    minibatch_bytes: int,
    waiting_batches: int,
    bounce_bytes: int,
) -> MemoryPlan:
    """Give every purpose its bytes; what is left becomes cache lines.

    rows: rows of each table that the largest minibatch reads. output_row_bytes: of a row as it is handed out.
    minibatch_bytes: the sampled minibatch itself. waiting_batches: sampled minibatches beside those in the
    window and planned.
    More than planned_batches may be planned at once, up to the most, where outputs are small beside the
    whole. Tables share the lines in proportion to their bytes on disk. cache_bytes caps the lines (0: none).
    Raises MemoryBudgetError, with the sum, when not even the rest fits.
    """
    output = output_bytes(tables, rows, output_row_bytes)
    planned = affordable_planned(memory_bytes, output, planned_batches, most_planned_batches)
    purposes = needed_bytes(
        tables,
        rows=rows,
        output_row_bytes=output_row_bytes,
        window_batches=window_batches,
        planned_batches=planned,
        minibatch_bytes=minibatch_bytes,
        waiting_batches=waiting_batches,
        bounce_bytes=bounce_bytes,
    )
    left = what_is_left(memory_bytes, purposes)
    if cache_bytes is not None:
        left = min(left, cache_bytes)
    lines = share_lines(tables, left, _core.LINE_METADATA_BYTES)
    purposes["lines"] = sum(lines[t.name] * t.page_bytes for t in tables)
    purposes["line metadata"] = sum(n * _core.LINE_METADATA_BYTES for n in lines.values())
    return MemoryPlan(purposes, lines, planned)


def affordable_planned(memory_bytes: int, output_bytes: int, least: int, most: int) -> int:
    """Minibatches that may be planned at once, so that further ones' outputs are small beside the whole."""
    return max(least, min(most, memory_bytes // SMALL // max(1, output_bytes) - 2))


def what_is_left(memory_bytes: int, purposes: Mapping[str, int]) -> int:
    """Of memory_bytes after all purposes. MemoryBudgetError lists the sum when there is nothing left."""
    needed = sum(purposes.values())
    if needed > memory_bytes:
        listing = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in purposes.items())
        raise MemoryBudgetError(
            f"memory_bytes={memory_bytes} ({format_bytes(memory_bytes)}) is too small: "
            f"{listing} = {needed} bytes ({format_bytes(needed)}) before the first "
            f"cache line. Give more memory, or use smaller minibatches, a smaller window or "
            f"fewer planned minibatches."
        )
    return memory_bytes - needed


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
