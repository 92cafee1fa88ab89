"""Results of the sides of a comparison, made up."""

from __future__ import annotations

from typing import Any

from gids.measure.sides import EpochResult

STAGES = ("sampling", "reading", "gather", "planning", "training")


def epoch_result(side: str, **values: Any) -> EpochResult:
    """6 minibatches of 100 rows in 2 s, unless values say otherwise."""
    usual = {
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "stages": dict.fromkeys(STAGES, 0.3),
        "batches": 6,
        "rows": 600,
        "read_bytes": 10**6,
        "hit_ratio": 0.25,
        "base_rss_bytes": 1,
        "peak_rss_bytes": 2,
        "memory_limit_bytes": None,
        "headroom_bytes": 70 << 20,
        "compared_rows": 32,
        "wrong_rows": 0,
        "cached_before": 0.0,
    }
    return EpochResult(**{"side": side, **usual, **values})
