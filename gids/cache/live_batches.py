"""Chooses how many minibatches are held at once: the length of the window, and how many are planned.

Called by the budgets of host and device memory, which compute what a choice leaves for cache lines. It
knows sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

GROWTH = 1.25
"""Memory is reserved for minibatches larger than the first by this factor."""

GROWTHS = (GROWTH, 1.0625, 1.03, 1.015, 1.0)
"""The factors to try, in this order, where memory is short."""

CHEAP = 16
"""A window is not shortened if it takes less than a sixteenth of the bytes of the lines."""

REACH = 3
"""A window is useful while its minibatches read at most about three times what the lines hold.

Measured by `gids bench hit-ratio` on graphs with power-law degrees: a longer window adds about one point.
"""


@dataclass(frozen=True)
class Sizes:
    """The size of a minibatch, and how many minibatches are held at once.

    rows: rows that one minibatch reads, by table. page_bytes: bytes of the pages that hold these rows.
    minibatch_bytes: memory of the sampled minibatch itself. window_batches: minibatches in the window.
    planned_batches: minibatches planned at once; at least least_planned_batches where memory is short, at
    most most_planned_batches. waiting_batches: sampled minibatches that wait for the window. source_bytes:
    memory of the sampler, as a function of waiting_batches. growths: factors of room for larger minibatches,
    the preferred one first.
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
    growths: tuple[float, ...] = GROWTHS

    @property
    def live_batches(self) -> int:
        """Minibatches in the window or planned."""
        return self.window_batches + self.planned_batches

    @property
    def most_loads(self) -> int:
        """Upper bound of the pages that planned minibatches miss."""
        return self.planned_batches * sum(self.rows.values())

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
    """How memory is shared out.

    purposes: bytes by purpose. lines: cache lines by table. sizes: the largest minibatch, the window and the
    planned minibatches that fit. capped: more memory would not add lines. late_outputs: minibatches get
    their outputs when they are gathered, not when they are planned. host_lines: of a plan for a device, the
    lines in host memory by table.
    """

    purposes: Mapping[str, int]
    lines: Mapping[str, int]
    sizes: Sizes
    capped: bool
    late_outputs: bool = False
    host_lines: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """One way to hold minibatches. plan: shares memory out for sizes; None if they do not fit.

    least_lines: the way is good enough with lines of this many times the bytes of the outputs.
    """

    sizes: Sizes
    plan: Callable[[Sizes], MemoryPlan | None]
    least_lines: float = 0


def best_plan(ways: Iterable[Way]) -> MemoryPlan | None:
    """The first way that is good enough, else the last that fits; each with the longest window that pays."""
    found = None
    for way in ways:
        if (plan := _with_window(way)) is None:
            continue
        found = plan
        if plan.capped or plan.purposes["lines"] >= way.least_lines * plan.purposes["outputs"]:
            return plan
    return found


def _with_window(way: Way) -> MemoryPlan | None:
    shorter = range(way.sizes.window_batches, -1, -1)
    for sizes in (way.sizes, *map(way.sizes.shortened, shorter)):
        plan = way.plan(sizes)
        if plan is not None and (sizes.window_batches <= 1 or plan.capped or _pays(plan)):
            return plan
    return None


def _pays(plan: MemoryPlan) -> bool:
    """Whether the window is worth its memory, which a shorter one would leave to the lines."""
    window, lines = plan.purposes["window"], plan.purposes["lines"]
    reach = plan.sizes.window_batches * plan.sizes.page_bytes
    return CHEAP * window <= lines or (window <= lines and reach <= REACH * lines)
