"""How many minibatches are held at once: how long the window is, and how many are planned.

Called by the budgets of host and device memory, which tell it what a choice leaves for cache lines. Knows
sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

GROWTH = 1.25
"""How much larger than the first minibatch a later one is expected to get."""

GROWTHS = (GROWTH, 1.0625, 1.03, 1.015, 1.0)
"""The same where memory is short: the less there is, the less of it is kept for larger minibatches."""

CHEAP = 16
"""A window that takes less than a sixteenth of what the lines take is not worth shortening."""

REACH = 3
"""A window is of use while its minibatches read at most about three times what the lines hold.

Measured by `gids bench hit-ratio`, graphs with power-law degrees: a longer one finds about a point more.
"""


@dataclass(frozen=True)
class Sizes:
    """How large minibatches are, and how many are held at once.

    rows: rows of each table that one reads. page_bytes: bytes of the pages that hold these rows.
    minibatch_bytes: memory of the sampled minibatch itself. window_batches: sampled ahead. planned_batches:
    planned at once; most_planned_batches: that may ever be; least_planned_batches: where memory is short.
    waiting_batches: sampled minibatches beside these. source_bytes: memory of what samples them, by the
    number that wait. growths: room for larger minibatches, as factors, the one that is wanted first.
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
        """Pages that planned minibatches may miss, at most."""
        return self.planned_batches * sum(self.rows.values())

    def grown(self, times: float) -> Sizes:
        """The same with larger minibatches."""
        return replace(
            self,
            rows={name: int(times * n) for name, n in self.rows.items()},
            page_bytes=int(times * self.page_bytes),
            minibatch_bytes=int(times * self.minibatch_bytes),
        )

    def with_planned(self, planned_batches: int) -> Sizes:
        """The same with so many planned at once."""
        return replace(self, planned_batches=planned_batches)

    def shortened(self, window_batches: int) -> Sizes:
        """The same with a shorter window, which minibatches enter as they are sampled: none wait."""
        return replace(self, window_batches=window_batches, waiting_batches=0)


class Share(Protocol):
    """What a budget makes of a choice. purposes: bytes by purpose. capped: more memory, no more lines."""

    @property
    def purposes(self) -> Mapping[str, int]: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def capped(self) -> bool: ...


S = TypeVar("S", bound=Share)


@dataclass(frozen=True)
class Way(Generic[S]):
    """One way to hold minibatches. share: what it leaves, None where it does not fit.

    least_lines: bytes of lines with which it is good enough, as a part of the bytes of outputs.
    """

    sizes: Sizes
    share: Callable[[Sizes], S | None]
    least_lines: float = 0


def best_share(ways: Iterable[Way[S]]) -> S | None:
    """The first way that is good enough, else the last that fits; each with as long a window as pays."""
    found = None
    for way in ways:
        if (share := _with_window(way)) is None:
            continue
        found = share
        if share.capped or share.purposes["lines"] >= way.least_lines * share.purposes["outputs"]:
            return share
    return found


def _with_window(way: Way[S]) -> S | None:
    shorter = range(way.sizes.window_batches, -1, -1)
    for sizes in (way.sizes, *map(way.sizes.shortened, shorter)):
        share = way.share(sizes)
        if share is not None and (sizes.window_batches <= 1 or share.capped or _pays(share)):
            return share
    return None


def _pays(share: Share) -> bool:
    """Whether the window is worth its memory, which a shorter one would leave to the lines."""
    window, lines = share.purposes["window"], share.purposes["lines"]
    reach = share.sizes.window_batches * share.sizes.page_bytes
    return CHEAP * window <= lines or (window <= lines and reach <= REACH * lines)
