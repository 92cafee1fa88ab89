"""How gids chose to read an epoch: the entries of stats()["packs"]["choices"], as a sentence and as metrics.

Called by gids.bench.epoch, the quickstart and bench/packs.py. Knows only the entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Choice = Mapping[str, Any]


def describe_choice(choice: Choice) -> str:
    """A clause: how a run of minibatches was read, its seconds, and the predicted seconds of each way."""
    superbatches, packs = choice["superbatches"], choice["packs"]
    said = f"{choice['minibatches']:,} minibatches by {choice['way']} reads"
    if choice["way"] != "random":
        said += f" in {packs:,} packs of {superbatches:,} superbatch{'es' * (superbatches != 1)}"
        said += f", took {choice['actual_s']:.1f} s"
    predicted = [
        f"{way} {seconds:.1f} s" if math.isfinite(seconds) else f"{way} does not fit in memory"
        for way, seconds in sorted(choice["predicted_s"].items(), key=lambda item: float(item[1]))
    ]
    return f"{said} (predicted: {', '.join(predicted)})" if predicted else said


def predictions(choices: Iterable[Choice]) -> dict[str, float]:
    """Metrics of all choices together: the predicted seconds of each way, and the actual ones of packs."""
    total: dict[str, float] = {}
    for choice in choices:
        seconds = {f"predicted_{way}_s": s for way, s in choice["predicted_s"].items() if math.isfinite(s)}
        if choice["way"] != "random":
            seconds["chosen_s"] = choice["actual_s"]
        for name, s in seconds.items():
            total[name] = total.get(name, 0.0) + s
    return total
