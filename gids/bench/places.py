"""Cache sizes as people give them, in lines. Called by hit_ratio.py, bandwidth.py."""

from __future__ import annotations

import argparse

from gids import _core
from gids.bench.case import Case
from gids.bench.report import Report
from gids.sizes import format_bytes, parse_bytes


def parse_places(place: str) -> tuple[str, str, float]:
    """(as given, unit, number) of a cache size: unit "%", "x" or "B". Raises ValueError."""
    unit = place[-1:] if place[-1:] in ("%", "x") else "B"
    try:
        number = float(parse_bytes(place)) if unit == "B" else float(place[:-1])
    except (ValueError, argparse.ArgumentTypeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"--cache {place}: write 2% of the pages, 4GB of lines, or 5x an average minibatch")
    return place, unit, number / 100 if unit == "%" else number


def parse_size(place: str, page_count: int, page_bytes: int) -> int:
    """Bytes of a cache size, "2%" of a table or "4GB", for FeatureLoader. Raises ValueError."""
    _, unit, number = parse_places(place)
    if unit == "x":
        raise ValueError(f"--cache {place}: write 2% of the pages, or 4GB of lines")
    if unit == "B":
        return int(number)
    return int(number * page_count) * (page_bytes + _core.LINE_METADATA_BYTES)


def cache_sizes(sizes: list[tuple[str, str, float]], case: Case, report: Report) -> list[tuple[str, int]]:
    """(what to call it, lines) of each cache size, each once."""
    traced = case.traced
    each = float(report.subject["pages_per_batch"])
    found: dict[int, str] = {}
    for place, unit, number in sizes:
        lines = int(
            {"%": number * traced.page_count, "x": number * each, "B": number // traced.page_bytes}[unit]
        )
        if lines >= traced.page_count:
            lines = traced.page_count
            report.note(f"a cache of {place} holds the whole table: all are hits once every page was read")
        if not lines and number:
            ways = " (2% is a share of the pages, 5x so many minibatches)" if unit == "B" else ""
            report.note(
                f"a cache of {place} holds not one page of {traced.page_bytes} B: nothing is hit{ways}"
            )
        size = format_bytes(lines * traced.page_bytes)
        found.setdefault(lines, f"{place} ({size})" if unit != "B" else size)
    return [(name, lines) for lines, name in sorted(found.items())]
