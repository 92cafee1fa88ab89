"""The log line about how memory is shared out, with advice. Called by FeatureLoader. Knows sizes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gids.cache.budget import advised_bytes
from gids.cache.live_batches import MemoryPlan, Sizes
from gids.sizes import format_bytes

if TYPE_CHECKING:
    from gids.loader.placement import Placement
    from gids.store import Table

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
