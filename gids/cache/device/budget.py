"""The memory budget on a CUDA device: what steps need, then lines. Called by the loader; knows sizes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gids.cache.budget import (
    SCARCE,
    TableShape,
    affordable_planned,
    output_bytes,
    share_lines,
    too_little,
)
from gids.cache.device.state import miss_bytes, order_bytes
from gids.cache.live_batches import Sizes, Way, best_share
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

SMALL_BYTES = 1 << 20
"""Counters, histograms and the rings of the request queue: less than this."""

OWNER_BYTES = 8
"""Device memory per line, besides its page: which page it holds."""


@dataclass(frozen=True)
class DeviceMemoryPlan:
    """Bytes of device memory by purpose, and each table's lines on the device and in host memory.

    sizes, capped: as of MemoryPlan.
    """

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    host_lines: Mapping[str, int]
    sizes: Sizes
    capped: bool


def check_device_memory(asked: Mapping[str, int | None], *, free_bytes: int, device: str) -> None:
    """MemoryBudgetError when an argument (name -> bytes) asks for more device memory than is free."""
    for name, value in asked.items():
        if value is not None and value > free_bytes:
            raise MemoryBudgetError(
                f"{name}={value} ({format_bytes(value)}), but {device} has {format_bytes(free_bytes)} free "
                f"({free_bytes} bytes): give less, or free what other tensors and processes hold there"
            )


def needed_device_bytes(
    tables: Sequence[TableShape], sizes: Sizes, *, output_row_bytes: Mapping[str, int], bounce_bytes: int
) -> dict[str, int]:
    """What minibatches of these sizes take by purpose, before the first line. Arguments as of the next.

    outputs: one per planned minibatch, one with the consumer, and one whose work on the device has not ended.
    """
    misses = sum(miss_bytes(min(t.page_count, sizes.rows[t.name])) for t in tables)
    purposes = {
        "page tables": sum(8 * t.page_count for t in tables),
        "outputs": output_bytes(tables, sizes.rows, output_row_bytes) * (sizes.planned_batches + 2),
        "window": 8 * sum(sizes.rows.values()) * sizes.live_batches,
        "scratch": misses * sizes.planned_batches + bounce_bytes + SMALL_BYTES,
    }
    if orders := order_bytes(tables):
        purposes["row orders"] = orders
    return purposes


def share_device_memory(
    tables: Sequence[TableShape],
    sizes: Sizes,
    *,
    memory_bytes: int,
    cache_bytes: int | None,
    host_cache_bytes: int,
    output_row_bytes: Mapping[str, int],
    bounce_bytes: int = 0,
) -> DeviceMemoryPlan:
    """Give every purpose its bytes of device memory; what is left becomes cache lines.

    sizes: of minibatches like the first, with the window and the planned minibatches that are wanted.
    output_row_bytes: of a row as it is handed out. bounce_bytes: what pages are read to where warps wait for
    them. Tables share the lines, and those in host memory, in proportion to their bytes on disk. cache_bytes
    caps the lines on the device (0: none).

    Where the lines would get little there is less room for minibatches that are larger than the first, then
    fewer are planned; the window is as long as pays. Raises MemoryBudgetError, with the sum, when not even
    the least of these fits.
    """

    def needs(chosen: Sizes) -> dict[str, int]:
        return needed_device_bytes(
            tables, chosen, output_row_bytes=output_row_bytes, bounce_bytes=bounce_bytes
        )

    def share(chosen: Sizes) -> DeviceMemoryPlan | None:
        purposes = needs(chosen)
        left = memory_bytes - sum(purposes.values())
        if left < 0:
            return None
        capped = cache_bytes is not None and left > cache_bytes
        if cache_bytes is not None:
            left = min(left, cache_bytes)
        host_lines = share_lines(tables, host_cache_bytes, 0)
        left -= OWNER_BYTES * sum(host_lines.values())
        lines = share_lines(tables, max(0, left), OWNER_BYTES)
        for t in tables:  # a table that fits on the device needs no tier in host memory
            host_lines[t.name] = min(host_lines[t.name], t.page_count - lines[t.name])
        purposes["lines"] = sum(lines[t.name] * t.page_bytes for t in tables)
        purposes["line owners"] = OWNER_BYTES * (sum(lines.values()) + sum(host_lines.values()))
        capped = capped or all(lines[t.name] == t.page_count for t in tables)
        return DeviceMemoryPlan(purposes, lines, host_lines, chosen, capped)

    roomy, *rest = sizes.growths
    tight = rest or [roomy]
    output = output_bytes(tables, sizes.grown(roomy).rows, output_row_bytes)
    more = affordable_planned(memory_bytes, output, sizes.planned_batches, sizes.most_planned_batches)
    fewer = range(sizes.planned_batches, sizes.least_planned_batches - 1, -1)
    least = sizes.with_planned(sizes.least_planned_batches)
    ways = [
        Way(sizes.with_planned(more).grown(roomy), share, least_lines=1),
        *(Way(sizes.with_planned(planned).grown(tight[0]), share, least_lines=SCARCE) for planned in fewer),
        *(Way(least.grown(growth), share) for growth in tight),
    ]
    if (best := best_share(ways)) is not None:
        return best
    raise too_little(memory_bytes, needs(least.shortened(0).grown(tight[-1])))
