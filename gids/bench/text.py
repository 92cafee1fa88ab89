"""Tables of text: aligned columns, and numbers with fitting units. Called by `gids partition`, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a report. show: formats a number. spread: append the range over the repeats."""

    title: str
    metric: str
    show: Callable[[float], str]
    spread: bool = False


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def millions(value: float) -> str:
    """About three digits."""
    return _three_digits(value / 1e6)


def seconds(value: float) -> str:
    """In ns, us, ms or s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value / 1e-9:.0f} ns"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """A table. The first row has the titles, with a rule below them.

    left: number of columns that are aligned to the left, the others are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "   ".join(cells).rstrip()

    titles, *lines = map(line, rows)
    rule = "-" * max(map(len, [titles, *lines]))
    return "\n".join([titles, rule, *lines])
