"""Arithmetic with FeatureLoader.stats(): what happened between two of them, sums over loaders, and in words.

Numbers that count are subtracted and added. Sizes and names are those of the later stats().
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Stats = Mapping[str, Any]
PRESENT = ("seed", "memory", "window", "planned", "policy", "heat", "engine", "scratch")
"""Entries that say how things are, and count nothing of one loader."""

PACK_COUNTERS = dict.fromkeys(("superbatches", "minibatches", "bytes_read", "bytes_written"), 0)
PACK_SECONDS = dict.fromkeys(("plan", "sweep", "wait", "gather"), 0.0)


def no_packs() -> dict[str, Any]:
    """stats()["packs"] of a loader that reads at random."""
    return {**PACK_COUNTERS, "seconds": dict(PACK_SECONDS), "choices": [], "scratch": []}


def no_rows() -> dict[str, Any]:
    """What the stats() of a loader without tables have too."""
    return {"memory": {"lines": 0}, "packs": no_packs()}


_STAGES = ("sample", "plan", "wait", "gather")


def epoch_summary(before: Stats, after: Stats, minibatches: int, seconds: float) -> str | None:
    """One line about the time between two FeatureLoader.stats(); None without minibatches."""
    if not minibatches:
        return None
    epoch = between(before, after)
    packs, pages = epoch["packs"], epoch["pages"]
    stages = ", ".join(f"{name} {epoch['seconds'][name]:.2f} s" for name in _STAGES)
    ratio = f"{100 * epoch['hits'] / pages:.1f} % of {pages} pages hit" if pages else "no pages"
    read = f"{epoch['bytes_read'] / 1e6:.1f} MB read"
    if packs["minibatches"]:
        read += f", {packs['bytes_written'] / 1e6:.1f} MB written"
        ratio = describe_choices(packs["choices"])
    return f"{minibatches} minibatches in {seconds:.2f} s: {ratio}, {read}; {stages}"


def is_size(key: str) -> bool:
    """Whether a counter of a table is a present size, and not a number of events."""
    return key in ("lines", "host_lines") or key.endswith("_bytes")


def between(before: Stats, after: Stats) -> dict[str, Any]:
    """What happened from one stats() to the next of the same FeatureLoader."""
    return _combined(before, after, -1)


def added(first: Stats, second: Stats) -> dict[str, Any]:
    """The sum of two stats()."""
    return _combined(first, second, 1)


def epoch_figures(before: Stats, after: Stats) -> dict[str, float]:
    """The figures of the time between two stats(), for a logger: {"hit_ratio", "pages_read", "bytes_read",
    "seconds/sample", "seconds/plan", "seconds/wait", "seconds/gather", "seconds/read"}. {} without tables.
    """
    if "seconds" not in after:
        return {}
    epoch = between(before, after)
    figures = {name: float(epoch[name]) for name in ("hit_ratio", "pages_read", "bytes_read")}
    return figures | {f"seconds/{stage}": float(seconds) for stage, seconds in epoch["seconds"].items()}


def describe_choices(choices: Sequence[Stats]) -> str:
    """stats()["packs"]["choices"] in words: minibatches, seconds and predicted seconds, by way of reading.

    Empty without choices: then the loader considered random reads only.
    """
    return "; ".join(
        _describe(way, [choice for choice in choices if choice["way"] == way])
        for way in dict.fromkeys(choice["way"] for choice in choices)
    )


def _describe(way: str, choices: Sequence[Stats]) -> str:
    def total(key: str) -> Any:
        return sum(choice[key] for choice in choices)

    said = f"{total('minibatches'):,} minibatches by {way} reads"
    said += f", took {total('actual_s'):.1f} s"
    ways = set[str].intersection(*(set(choice["predicted_s"]) for choice in choices))
    seconds = {name: sum(float(choice["predicted_s"][name]) for choice in choices) for name in ways}
    predicted = [f"{name} {s:.1f} s" for name, s in sorted(seconds.items(), key=lambda item: item[1])]
    return f"{said} (predicted: {', '.join(predicted)})" if predicted else said


def _combined(first: Stats, second: Stats, sign: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in second.items():
        before = first.get(key)
        if before is None or key in PRESENT or is_size(key):
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _combined(before, value, sign)
        elif isinstance(value, list):  # of choices, in their order
            result[key] = value[len(before) :] if sign < 0 else before + value
        else:
            result[key] = value + sign * before
    result |= {key: value for key, value in first.items() if key not in second}
    if "hit_ratio" in result:
        result["hit_ratio"] = result["hits"] / result["pages"] if result["pages"] else 0.0
    return result
