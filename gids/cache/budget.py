"""The memory budget: one number for everything, shared out before anything is allocated.

Called by the loader once the first minibatch has shown how large minibatches are. Knows sizes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from gids import _core
from gids.errors import MemoryBudgetError

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

    rows: rows of each table that the first minibatch reads. output_row_bytes: of a row as it is handed out.
    minibatch_bytes: the sampled minibatch itself. waiting_batches: sampled minibatches beside those in the
    window and planned.
    Outputs: one per planned minibatch, one with the consumer, one between the two; for more planned
    minibatches, up to the most, where outputs are small beside the whole. Tables share the lines in
    proportion to their bytes on disk. cache_bytes caps the lines (0: none).
    Raises MemoryBudgetError, with the sum, when not even the rest fits.
    """
    output = int(GROWTH * sum(rows[t.name] * output_row_bytes[t.name] for t in tables))
    planned = affordable_planned(memory_bytes, output, planned_batches, most_planned_batches)
    ids = int(GROWTH * sum(rows.values()))
    live = window_batches + planned
    purposes = {
        "page tables": sum(8 * t.page_count for t in tables),
        "bounce pool": bounce_bytes,
        "outputs": output * (planned + 2),
        "window": ids * 16 * live + int(GROWTH * minibatch_bytes) * (live + waiting_batches),
    }
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


def format_bytes(n: int) -> str:
    """12345678 -> '11.8 MiB'."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
