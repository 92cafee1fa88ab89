"""The memory budget on a CUDA device: what steps need, then lines. Called by the loader; knows sizes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gids.cache.budget import (
    TableShape,
    affordable_planned,
    output_bytes,
    share_lines,
    what_is_left,
)
from gids.cache.device_state import miss_bytes, order_bytes
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

SMALL_BYTES = 1 << 20
"""Counters, histograms and the rings of the request queue: less than this."""

OWNER_BYTES = 8
"""Device memory per line, besides its page: which page it holds."""


@dataclass(frozen=True)
class DeviceMemoryPlan:
    """Bytes of device memory by purpose, and each table's lines on the device and in host memory."""

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    host_lines: Mapping[str, int]
    most_planned_batches: int
    """How many minibatches may be planned at once within the bytes of the outputs."""


def check_device_memory(asked: Mapping[str, int | None], *, free_bytes: int, device: str) -> None:
    """MemoryBudgetError when an argument (name -> bytes) asks for more device memory than is free."""
    for name, value in asked.items():
        if value is not None and value > free_bytes:
            raise MemoryBudgetError(
                f"{name}={value} ({format_bytes(value)}), but {device} has {format_bytes(free_bytes)} free "
                f"({free_bytes} bytes): give less, or free what other tensors and processes hold there"
            )


def needed_device_bytes(
    tables: Sequence[TableShape],
    *,
    rows: Mapping[str, int],
    output_row_bytes: Mapping[str, int],
    window_batches: int,
    planned_batches: int,
    bounce_bytes: int,
) -> dict[str, int]:
    """What minibatches of this size take by purpose, before the first line. Arguments as of the next."""
    misses = sum(miss_bytes(min(t.page_count, rows[t.name])) for t in tables)
    purposes = {
        "page tables": sum(8 * t.page_count for t in tables),
        "outputs": output_bytes(tables, rows, output_row_bytes) * (planned_batches + 2),
        "window": 8 * sum(rows.values()) * (window_batches + planned_batches),
        "scratch": misses * planned_batches + bounce_bytes + SMALL_BYTES,
    }
    if orders := order_bytes(tables):
        purposes["row orders"] = orders
    return purposes


def share_device_memory(
    tables: Sequence[TableShape],
    *,
    memory_bytes: int,
    cache_bytes: int | None,
    host_cache_bytes: int,
    rows: Mapping[str, int],
    output_row_bytes: Mapping[str, int],
    window_batches: int,
    planned_batches: int,
    most_planned_batches: int,
    bounce_bytes: int = 0,
) -> DeviceMemoryPlan:
    """Give every purpose its bytes of device memory; what is left becomes cache lines.

    rows: rows of each table that the largest minibatch reads. output_row_bytes: of a row as it is handed out.
    bounce_bytes: what pages are read to where warps wait for them. Tables share the lines, and those in host
    memory, in proportion to their bytes on disk. cache_bytes caps the lines on the device (0: none). Raises
    MemoryBudgetError, with the sum, when not even the rest fits.
    """
    output = output_bytes(tables, rows, output_row_bytes)
    planned = affordable_planned(memory_bytes, output, planned_batches, most_planned_batches)
    purposes = needed_device_bytes(
        tables,
        rows=rows,
        output_row_bytes=output_row_bytes,
        window_batches=window_batches,
        planned_batches=planned,
        bounce_bytes=bounce_bytes,
    )
    left = what_is_left(memory_bytes, purposes)
    if cache_bytes is not None:
        left = min(left, cache_bytes)
    host_lines = share_lines(tables, host_cache_bytes, 0)
    left -= OWNER_BYTES * sum(host_lines.values())
    lines = share_lines(tables, max(0, left), OWNER_BYTES)
    for t in tables:  # a table that fits on the device needs no tier in host memory
        host_lines[t.name] = min(host_lines[t.name], t.page_count - lines[t.name])
    purposes["lines"] = sum(lines[t.name] * t.page_bytes for t in tables)
    purposes["line owners"] = OWNER_BYTES * (sum(lines.values()) + sum(host_lines.values()))
    return DeviceMemoryPlan(purposes, lines, host_lines, planned)
