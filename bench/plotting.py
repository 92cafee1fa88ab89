"""Style, colours and bars of the figures. Called by plot.py, hit_ratio_plot.py and sampler_plot.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from gids.bench.report import Figure
from gids.bench.text import Column, shared

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4.5,
}


def save_plot(path: Path, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Call draw with a new figure; write it as PNG. size: width and height in inches. Needs no display."""
    with rc_context(_STYLE):
        figure = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path, dpi=130, format="png")


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


def draw_bars(canvas: Any, figures: Sequence[Figure], settings: Mapping[str, str], column: Column) -> None:
    """A bar per row of the command's table: the median of a column, with the range over the repeats."""
    same = shared(figures, settings)
    keys = [key for key in settings if key not in same]
    middle, ranges = spread(figures, column.metric, 1)
    panel = canvas.subplots()
    bars = panel.barh(range(len(figures)), middle, xerr=ranges, capsize=2, color=COLOURS[0])
    panel.bar_label(bars, [column.show(value) for value in middle], fontsize=7, padding=2)
    labels = [
        ", ".join(f"{settings[k]} {v}" for k in keys if (v := f.setting.get(k)) is not None) for f in figures
    ]
    panel.set_yticks(range(len(figures)), labels, fontsize=8)
    panel.set_ylim(len(figures) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.xaxis.set_major_formatter(lambda value, _: column.show(value))
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(column.title)
