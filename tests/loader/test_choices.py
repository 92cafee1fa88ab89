"""How an epoch was read, in words."""

from __future__ import annotations

from typing import Any

from gids.loader.stats import describe_choices

PREDICTED = {"pack": 20.0, "other": 31.5}


def choice(way: str, **values: Any) -> dict[str, Any]:
    return {
        "way": way,
        "minibatches": 1250,
        "predicted_s": PREDICTED,
        "actual_s": 21.25,
    } | values


RANDOM = choice("random", predicted_s={"pack": 2.0, "random": 1.0}, actual_s=1.5, minibatches=9)


def test_choices_are_described_and_added_up_by_way() -> None:
    one = choice("pack", predicted_s={})
    last = choice("pack", minibatches=10, predicted_s={"pack": 0.5}, actual_s=0.25)
    packs = "1,250 minibatches by pack reads, took 21.2 s"
    for choices, words in (
        ([], ""),
        ([one], packs),
        (
            [choice("pack")],
            f"{packs} (predicted: pack 20.0 s, other 31.5 s)",
        ),
        (
            [choice("pack"), RANDOM, last],
            "1,260 minibatches by pack reads, took 21.5 s (predicted: pack "
            "20.5 s); 9 minibatches by random reads, took 1.5 s (predicted: random 1.0 s, pack 2.0 s)",
        ),
    ):
        assert describe_choices(choices) == words
