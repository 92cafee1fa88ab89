"""Results of the sides of a comparison: made up, or of a training in this process."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from gids.bench import epoch, isolation, sides
from gids.bench.isolation import FreshProcessError
from gids.bench.sides import EpochResult


def epoch_result(side: str, **values: Any) -> EpochResult:
    """6 minibatches of 100 rows in 2 s, unless values say otherwise."""
    usual = {
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "stages": {"loading": 0.3, "training": 0.3},
        "batches": 6,
        "rows": 600,
        "read_bytes": 10**6,
        "hit_ratio": 0.25,
        "base_rss_bytes": 1,
        "peak_rss_bytes": 2,
        "compared_rows": 32,
        "wrong_rows": 0,
        "cached_before": 0.0,
    }
    return EpochResult(**{"side": side, **usual, **values})


def make_up(patch: pytest.MonkeyPatch, **outcomes: Any) -> list[Mapping[str, Any]]:
    """Replace the processes of sides: returns the configs that they get, a list that grows.

    outcomes: by the first word of a side, values of its result, or an error to raise.
    """
    configs: list[Mapping[str, Any]] = []

    def run(module: str, config: Mapping[str, Any], **options: Any) -> Any:
        configs.append({**config, **options})
        outcome = outcomes.get(config["side"].replace(", MADV_RANDOM", "_advised"), {})
        if isinstance(outcome, Exception):
            raise outcome
        return vars(epoch_result(config["side"], **outcome))

    patch.setattr(sides, "run_fresh", run)
    patch.setattr(epoch, "why_no_limit", lambda: "")
    return configs


def train_here(patch: pytest.MonkeyPatch) -> None:
    """Let sides train in this process, which has imported torch and DGL, without a limit of memory.

    A fresh process takes seconds to start.
    """

    def run(module: str, config: Mapping[str, Any], **_: Any) -> Any:
        training = importlib.import_module(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return json.loads(json.dumps(training.run(json.loads(json.dumps(config)))))
            except Exception as error:
                reason = f"failed (exit status 1): {type(error).__name__}: {error}"
                raise FreshProcessError(f"{module} {reason}", reason) from error

    patch.setattr(sides, "run_fresh", run)
    for module_with_it in (isolation, epoch):
        patch.setattr(module_with_it, "why_no_limit", lambda: "this process is not limited")
