"""Results of the sides of a comparison: made up, or of a training in this process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from gids.measure import sides
from gids.measure.isolation import FreshProcessError
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


def train_here(patch: pytest.MonkeyPatch) -> None:
    """Let sides train in this process, which has imported torch and DGL, without a limit of memory.

    A fresh process takes seconds to start. Stock's reading is measured for the first side of stock only.
    """

    def run(module: str, config: Mapping[str, Any], **_: Any) -> Any:
        from gids.measure import epoch

        assert module == epoch.__name__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return json.loads(json.dumps(epoch._run(json.loads(json.dumps(config)))))
            except Exception as error:
                reason = f"failed (exit status 1): {type(error).__name__}: {error}"
                raise FreshProcessError(f"{module} {reason}", reason) from error

    patch.setattr(sides, "run_fresh", run)
    patch.setattr(sides, "why_no_limit", lambda: "this process is not limited")
