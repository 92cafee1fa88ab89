"""Tables of text: aligned columns, and the figures of a bench command, one line per setting.

Called by gids.cli.bench, `gids partition` and `gids scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gids.bench.report import Figure


@dataclass(frozen=True)
class Column:
    """A column. show: formats a number. spread: append the range over the repeats."""

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
    scaled = value / 1e6
    return f"{scaled:,.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}"


def seconds(value: float) -> str:
    """In ns, us, ms or s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            scaled = value / scale
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"
    return f"{value / 1e-9:.0f} ns"


def shared(figures: Sequence[Figure], settings: Mapping[str, str]) -> dict[str, object]:
    """The settings, except the first one, that have the same value in all figures."""
    same: dict[str, object] = {}
    for key in list(settings)[1:]:
        values = {f.setting.get(key) for f in figures if f.values} - {None}
        if len(values) == 1:
            same[key] = values.pop()
    return same


def table(
    figures: Sequence[Figure],
    settings: Mapping[str, str],
    columns: Sequence[Column],
    *,
    upright: bool = False,
) -> str:
    """A line per figure: the settings (key -> title), then the columns. Empty columns are omitted.

    upright: a column per figure instead, for many columns and few figures.
    """
    shown = [figure for figure in figures if figure.values]
    used = [c for c in columns if any(c.metric in f.values for f in shown)]
    keys = [k for k in settings if any(f.setting.get(k) is not None for f in shown)]
    rows: list[Sequence[str]] = [[settings[k] for k in keys] + [c.title for c in used]]
    group: object = None
    for figure in shown:
        cells = [_setting(figure.setting.get(k)) for k in keys]
        if len(keys) > 1 and cells[0] == group:
            cells[0] = ""  # the same as on the line above
        else:
            group = cells[0]
        rows.append(cells + [_cell(figure, column) for column in used])
    return aligned(list(zip(*rows, strict=True)), left=1) if upright else aligned(rows, left=len(keys))


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


def _setting(value: object) -> str:
    return "-" if value is None else str(value)


def _cell(figure: Figure, column: Column) -> str:
    middle = figure.median(column.metric)
    if middle is None:
        return "-"
    values = figure.values[column.metric]
    if not column.spread or len(values) < 2:
        return column.show(middle)
    return f"{column.show(middle)} ({column.show(min(values))} to {column.show(max(values))})"
