"""`--plot FILE.png`: one bar per setting, drawn with matplotlib (the extra `plot`). Called by gids.cli.bench.

Needs no display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gids.bench.report import Figure
from gids.bench.text import Column, shared

DPI = 130
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


def require_matplotlib() -> None:
    """Raise ImportError if matplotlib is not installed, before the measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None


def save_plot(path: Path, draw: Callable[[Any], None], *, width: float, height: float) -> None:
    """Call draw with a new figure of width x height inches; write it as PNG. Raises ImportError, OSError."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path, dpi=DPI, format="png")


def save_bars(path: Path, figures: Sequence[Figure], settings: Mapping[str, str], column: Column) -> None:
    """Draw a column of the table: its median per setting, with the range over the repeats."""
    shown = [figure for figure in figures if column.metric in figure.values]
    if not shown:
        return
    same = shared(shown, settings)
    keys = [key for key in settings if key not in same]
    middle = [median(figure.values[column.metric]) for figure in shown]
    low = [m - min(f.values[column.metric]) for m, f in zip(middle, shown, strict=True)]
    high = [max(f.values[column.metric]) - m for m, f in zip(middle, shown, strict=True)]

    def draw(figure: Any) -> None:
        panel = figure.subplots()
        bars = panel.barh(range(len(shown)), middle, xerr=(low, high) if any(low + high) else None, capsize=2)
        panel.bar_label(bars, [column.show(value) for value in middle], fontsize=7, padding=2)
        labels = [
            ", ".join(f"{settings[k]} {v}" for k in keys if (v := f.setting.get(k)) is not None)
            for f in shown
        ]
        panel.set_yticks(range(len(shown)), labels, fontsize=8)
        panel.set_ylim(len(shown) - 0.4, -0.6)
        panel.margins(x=0.12)
        panel.xaxis.set_major_formatter(lambda value, _: column.show(value))
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(column.title)

    save_plot(path, draw, width=8.0, height=1.0 + 0.25 * len(shown))
