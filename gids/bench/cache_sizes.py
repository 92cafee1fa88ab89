"""Cache sizes given by users -> lines. Called by hit_ratio.py and bandwidth.py."""

from __future__ import annotations

import argparse

from gids import _core
from gids.bench.case import Case
from gids.bench.report import Report
from gids.sizes import format_bytes, parse_bytes


def parse_cache_size(place: str) -> tuple[str, str, float]:
    """Parse a cache size: (as given, unit "%", "x" or "B", number). Raises ValueError."""
    unit = place[-1:] if place[-1:] in ("%", "x") else "B"
    try:
        number = float(parse_bytes(place)) if unit == "B" else float(place[:-1])
    except (ValueError, argparse.ArgumentTypeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(
            f"--cache {place} is not a cache size: use 2% (of the pages), 4GB or 5x (minibatches)"
        )
    return place, unit, number / 100 if unit == "%" else number


def parse_size(place: str, page_count: int, page_bytes: int) -> int:
    """Bytes of a cache size, "2%" of a table or "4GB". Raises ValueError."""
    _, unit, number = parse_cache_size(place)
    if unit == "x":
        raise ValueError(f"--cache {place} is not a cache size: use 2% (of the pages) or 4GB")
    if unit == "B":
        return int(number)
    return int(number * page_count) * (page_bytes + _core.LINE_METADATA_BYTES)


def cache_lines(sizes: list[tuple[str, str, float]], case: Case, report: Report) -> list[tuple[str, int]]:
    """(name, lines) of each cache size, without repeats."""
    traced = case.traced
    each = float(report.subject["pages_per_batch"])
    found: dict[int, str] = {}
    for place, unit, number in sizes:
        lines = int(
            {"%": number * traced.page_count, "x": number * each, "B": number // traced.page_bytes}[unit]
        )
        if lines >= traced.page_count:
            lines = traced.page_count
            report.note(f"a cache of {place} holds the whole table: every page is a hit after its first read")
        if not lines and number:
            ways = " (2% is a share of the pages, 5x is five minibatches)" if unit == "B" else ""
            report.note(
                f"a cache of {place} is smaller than a page of {traced.page_bytes} B: nothing is hit{ways}"
            )
        size = format_bytes(lines * traced.page_bytes)
        found.setdefault(lines, f"{place} ({size})" if unit != "B" else size)
    return [(name, lines) for lines, name in sorted(found.items())]
