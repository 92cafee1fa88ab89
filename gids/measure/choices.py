"""How gids chose to read an epoch: stats()["packs"]["choices"] in words and as metrics.

Called by gids.bench.epoch and bench/packs.py. Knows only these entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Choice = Mapping[str, Any]


def describe_choices(choices: Sequence[Choice]) -> str:
    """A clause for each way of reading: its minibatches, its seconds, and the predicted seconds of all ways.

    Empty without choices: then the loader considered random reads only.
    """
    return "; ".join(
        _describe(way, [choice for choice in choices if choice["way"] == way])
        for way in dict.fromkeys(choice["way"] for choice in choices)
    )


def predictions(choices: Sequence[Choice]) -> dict[str, float]:
    """Metrics of all choices together: predicted seconds of each way that fits in memory, and actual ones."""
    if not choices:
        return {}
    predicted = {f"predicted_{way}_s": s for way, s in _predicted(choices).items() if math.isfinite(s)}
    return {**predicted, "chosen_s": _sum(choices, "actual_s")}


def _describe(way: str, choices: Sequence[Choice]) -> str:
    said = f"{_sum(choices, 'minibatches'):,} minibatches by {way} reads"
    if packs := _sum(choices, "packs"):
        superbatches = _sum(choices, "superbatches")
        said += f" in {packs:,} pack{'s' * (packs != 1)} of {superbatches:,} superbatch"
        said += "es" * (superbatches != 1)
    said += f", took {_sum(choices, 'actual_s'):.1f} s"
    predicted = [
        f"{name} {seconds:.1f} s" if math.isfinite(seconds) else f"{name} does not fit in memory"
        for name, seconds in sorted(_predicted(choices).items(), key=lambda item: item[1])
    ]
    return f"{said} (predicted: {', '.join(predicted)})" if predicted else said


def _predicted(choices: Sequence[Choice]) -> dict[str, float]:
    """Seconds by way, for the ways that were predicted for all of the choices."""
    ways = set[str].intersection(*(set(choice["predicted_s"]) for choice in choices))
    return {way: sum(float(choice["predicted_s"][way]) for choice in choices) for way in ways}


def _sum(choices: Sequence[Choice], key: str) -> Any:
    return sum(choice[key] for choice in choices)
