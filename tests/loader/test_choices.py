"""How an epoch was read, in words."""

from __future__ import annotations

from typing import Any

from gids.loader.stats import describe_choices

PREDICTED = {"pack": 20.0, "other": 31.5}


def choice(way: str, **values: Any) -> dict[str, Any]:
    return {
        "way": way,
        "minibatches": 1250,
        "superbatches": 1,
        "packs": 17,
        "resident_rows": 5,
        "predicted_s": PREDICTED,
        "actual_s": 21.25,
    } | values


RANDOM = choice(
    "random", superbatches=0, packs=0, predicted_s={"pack": 2.0, "random": 1.0}, actual_s=1.5, minibatches=9
)


def test_choices_are_described_and_added_up_by_way() -> None:
    one = choice("pack", packs=1, predicted_s={})
    last = choice("pack", minibatches=10, predicted_s={"pack": 0.5}, actual_s=0.25, packs=2)
    packs = "1,250 minibatches by pack reads in"
    for choices, words in (
        ([], ""),
        ([one], f"{packs} 1 pack of 1 superbatch, took 21.2 s"),
        (
            [choice("pack")],
            f"{packs} 17 packs of 1 superbatch, took 21.2 s (predicted: pack 20.0 s, other 31.5 s)",
        ),
        (
            [choice("pack"), RANDOM, last],
            "1,260 minibatches by pack reads in 19 packs of 2 superbatches, took 21.5 s (predicted: pack "
            "20.5 s); 9 minibatches by random reads, took 1.5 s (predicted: random 1.0 s, pack 2.0 s)",
        ),
    ):
        assert describe_choices(choices) == words
