"""The memory budget of a CUDA device. Called by the loader's placement. It knows sizes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gids import _core
from gids.cache.budget import Budget, Sizes
from gids.cache.device.state import miss_bytes, order_bytes
from gids.errors import MemoryBudgetError
from gids.sizes import format_bytes

SMALL_BYTES = 1 << 20
"""Upper bound of the counters, the histograms and the rings of the request queue."""

OWNER_BYTES = 8
"""Device memory per line beside its page: the number of the page that it holds."""


def check_device_memory(asked: Mapping[str, int | None], *, free_bytes: int, device: str) -> None:
    """Raise MemoryBudgetError if an argument (name -> bytes) asks for more device memory than is free."""
    for name, value in asked.items():
        if value is not None and value > free_bytes:
            raise MemoryBudgetError(
                f"{name}={value} ({format_bytes(value)}), but {device} has {format_bytes(free_bytes)} free "
                f"({free_bytes} bytes): give less, or free memory of other tensors and processes there"
            )


@dataclass(frozen=True, kw_only=True)
class DeviceBudget(Budget):
    """Shares device memory out. host_cache_bytes: for pinned lines in host memory, beside memory_bytes."""

    host_cache_bytes: int
    option = "device_memory"

    def needed(self, sizes: Sizes) -> dict[str, int]:
        """Bytes by purpose that minibatches of these sizes need, without lines.

        outputs: one per planned minibatch, one that the consumer holds, and one that the device still uses.
        """
        misses = sum(miss_bytes(min(t.page_count, sizes.rows[t.name])) for t in self.tables)
        purposes = {
            "page tables": sum(8 * t.page_count for t in self.tables),
            "outputs": self._output_bytes(sizes) * (sizes.planned_batches + 2),
            "window": 8 * sum(sizes.rows.values()) * sizes.live_batches,
            "scratch": misses * sizes.planned_batches + self.bounce_bytes + SMALL_BYTES,
        }
        if orders := order_bytes(self.tables):
            purposes["row orders"] = orders
        return purposes

    def _ways(self, sizes: Sizes, least: Sizes, tight: Sequence[float]) -> list[Sizes]:
        fewer = range(sizes.planned_batches, sizes.least_planned_batches - 1, -1)
        return [
            *(sizes.with_planned(n).grown(tight[0]) for n in fewer),
            *(least.grown(growth) for growth in tight),
        ]

    def _divide(
        self, left: int, sizes: Sizes, purposes: dict[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        host_lines = self._lines(self.host_cache_bytes, 0)
        lines = self._lines(max(0, left - OWNER_BYTES * sum(host_lines.values())), OWNER_BYTES)
        for t in self.tables:  # pages with a line on the device need none in host memory
            most = min(t.page_count, _core.MAX_LINES) - lines[t.name]
            host_lines[t.name] = min(host_lines[t.name], most)
        purposes["line owners"] = OWNER_BYTES * (sum(lines.values()) + sum(host_lines.values()))
        return lines, host_lines
