"""How an epoch was read, as a sentence and as metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gids.measure.choices import describe_choice, predictions


def choice(way: str, **values: Any) -> dict[str, Any]:
    return {
        "way": way,
        "minibatches": 1250,
        "superbatches": 1,
        "packs": 17,
        "resident_rows": 5,
        "predicted_s": {"pack": 20.0, "sweep": 31.5, "random": math.inf},
        "actual_s": 21.25,
    } | values


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            choice("pack"),
            "1,250 minibatches by pack reads in 17 packs of 1 superbatch, took 21.2 s (predicted: "
            "pack 20.0 s, sweep 31.5 s, random does not fit in memory)",
        ),
        (
            choice("sweep", superbatches=3, predicted_s={}),
            "1,250 minibatches by sweep reads in 17 packs of 3 superbatches, took 21.2 s",
        ),
        (
            choice("random", superbatches=0, packs=0, predicted_s={"pack": 2.0, "random": 1.0}, actual_s=0.0),
            "1,250 minibatches by random reads (predicted: random 1.0 s, pack 2.0 s)",
        ),
    ],
)
def test_a_choice_is_described_by_its_way_and_seconds(found: dict[str, Any], expected: str) -> None:
    assert describe_choice(found) == expected


def test_predictions_are_added_up_without_ways_that_do_not_fit() -> None:
    found = predictions(
        [choice("pack"), choice("random", predicted_s={"random": 3.0, "pack": 4.0}, actual_s=0.0)]
    )
    assert found == {
        "predicted_pack_s": 24.0,
        "predicted_sweep_s": 31.5,
        "predicted_random_s": 3.0,
        "chosen_s": 21.25,
    }
    assert predictions([]) == {}
