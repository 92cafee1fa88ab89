"""The quickstart's comparison: gids, stock DGL, and stock DGL without advice, one after the other.

Called by gids.cli.quickstart. Only gids must succeed: a failure of another side is part of the result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from gids.measure.sides import EpochConfig, EpochResult, run_gids, run_other
from gids.quickstart.steps import Step

OURS, STOCK, PLAIN = "gids", "stock", "stock_without_advice"
NAMES = {OURS: "gids", STOCK: "stock DGL", PLAIN: "stock DGL without MADV_RANDOM"}
PLAIN_SECONDS = 15.0  # time limit of stock without advice
_START_SECONDS = 60.0  # time limit of a side besides training
_LEAST_SECONDS = 20.0  # with less time left, no other side is started
_DAY = 86400.0


@dataclass
class Comparison:
    """results: by side. missing: why a side has no result, as a sentence."""

    results: dict[str, EpochResult] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, side: str, found: EpochResult | str) -> str:
        """Add a result, or the sentence that says why there is none. Returns the sentence, or ""."""
        if isinstance(found, EpochResult):
            self.results[side] = found
            return ""
        self.missing[side] = found
        return found


def compare(ours: EpochConfig, *, limited: bool, total_seconds: float, begun: float) -> Comparison:
    """Train on each side for ours.most_seconds at most. Blocks. limited: whether memory is limited.

    total_seconds: approximate time limit, counted from begun (time.monotonic()); 0: none. If gids takes long,
    stock gets less time, and stock without advice may be skipped. Raises FreshProcessError if gids fails.
    """
    comparison = Comparison()

    def left() -> float:
        return begun + (total_seconds or _DAY) - time.monotonic()

    with Step("training with gids") as step:
        timeout_s = 2 * (ours.most_seconds + _START_SECONDS) if ours.most_seconds else _DAY
        found = run_gids(ours, say=step.say, limited=limited, timeout_s=timeout_s, progress=step.show)
        comparison.add(OURS, found)
    # If all features fit into the page cache, reading ahead is faster.
    stock = replace(ours, side="stock", random_access=limited, headroom_bytes=found.headroom_bytes or 0)
    timeout_s = _DAY
    if total_seconds:
        seconds = max(_LEAST_SECONDS, left() - 2 * _LEAST_SECONDS)
        stock = replace(stock, most_seconds=min(ours.most_seconds or seconds, seconds))
        timeout_s = stock.most_seconds + _START_SECONDS
    with Step("training with stock DGL on a memory-mapped array") as step:
        other = run_other(NAMES[STOCK], stock, limited=limited, timeout_s=timeout_s, progress=step.show)
        step.say(comparison.add(STOCK, other))
    if not limited:
        return comparison
    timeout_s = min(left(), PLAIN_SECONDS + _START_SECONDS)
    if timeout_s < _LEAST_SECONDS:
        comparison.add(PLAIN, f"{NAMES[PLAIN]} was skipped, because the time was up")
        return comparison
    with Step("the same without MADV_RANDOM, for some seconds") as step:
        plain = replace(stock, random_access=False, val_nodes=0, most_seconds=PLAIN_SECONDS)
        other = run_other(NAMES[PLAIN], plain, timeout_s=timeout_s, progress=step.show)
        step.say(comparison.add(PLAIN, other))
    return comparison
