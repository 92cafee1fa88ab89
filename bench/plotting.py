"""Colours and horizontal bars of the documentation's figures. Called by the modules of plot.py."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from gids.bench.report import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_bars(panel: Any, runs: Sequence[Figure], metrics: dict[str, str], *, first_colour: int = 0) -> None:
    """Draw a row per run, from the top, with a bar per metric (name -> title), in millions.

    Bars of repeated runs are medians with their range. The caller names the rows.
    """
    thick = 0.8 / len(metrics)
    for number, (name, title) in enumerate(metrics.items()):
        lengths, ranges = spread(runs, name, 1e-6)
        drawn = panel.barh(
            [place + (number - (len(metrics) - 1) / 2) * thick for place in range(len(runs))],
            lengths,
            thick * 0.92,
            xerr=ranges,
            capsize=2,
            color=COLOURS[first_colour + number],
            label=title,
        )
        panel.bar_label(drawn, [_three_digits(length) for length in lengths], fontsize=7, padding=2)
    panel.margins(x=0.12)
    panel.set_ylim(len(runs) - 0.4, -0.6)
    panel.grid(axis="y", visible=False)


def spread(
    figures: Sequence[Figure], metric: str, scale: float
) -> tuple[list[float], tuple[list[float], list[float]] | None]:
    """Medians times scale, and the ranges below and above them; None if nothing was repeated."""
    values = [[scale * value for value in figure.values.get(metric, [0.0])] for figure in figures]
    middle = [median(found) for found in values]
    if all(len(found) == 1 for found in values):
        return middle, None
    low = [m - min(found) for m, found in zip(middle, values, strict=True)]
    high = [max(found) - m for m, found in zip(middle, values, strict=True)]
    return middle, (low, high)


def shared_settings(runs: Sequence[Figure]) -> set[str]:
    """The keys that have the same value in all runs."""
    return {key for key in runs[0].setting if len({run.setting[key] for run in runs}) == 1} if runs else set()


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
