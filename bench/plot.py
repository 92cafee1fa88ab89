"""Curves and stacked bars, as PNG. Called by the scripts of bench/. Needs matplotlib, and no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.2,
}
_LABELS = 60  # characters of a line of the legend

Curve = tuple[str, Sequence[float], Sequence[float]]
"""A label, and the values on both axes."""


def check_plotting() -> None:
    """Raise ImportError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None


def plot_curves(
    path: Path,
    title: str,
    panels: Mapping[str, Sequence[Curve]],
    axes: tuple[str, str],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw the curves of each panel as PNG. Raises OSError.

    axes: titles of both axes, with units. An empty second one is what follows ": " in the name of a panel.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 3 if len(panels) > 6 else min(2, len(panels))
    rows = -(-len(panels) // columns)
    handles: dict[str, Any] = {}  # each label once, as a panel may lack some curves
    numbers: dict[str, int] = {}  # a label looks alike in all panels
    with rc_context(_STYLE):
        canvas = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.7), layout="constrained")
        FigureCanvasAgg(canvas)
        drawn = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for panel, (name, curves) in zip(drawn, panels.items(), strict=False):
            for label, x, y in curves:
                number = numbers.setdefault(label, len(numbers))
                style = {"marker": _MARKERS[number % 7], "color": _COLOURS[number % 7]}
                handles.setdefault(label, *panel.plot(x, y, label=label, **style))
            panel.set_title(name, fontsize=9)
            panel.set(xlabel=axes[0], ylabel=axes[1] or name.partition(": ")[2])
            panel.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
            panel.tick_params(which="minor", labelsize=5)  # numbers between powers of ten
        for panel in drawn[len(panels) :]:
            panel.set_visible(False)
        canvas.suptitle(title, fontsize=10)
        per_line = max(1, columns * _LABELS // (8 + max(map(len, handles), default=0)))
        canvas.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=per_line, fontsize=8
        )
        canvas.savefig(path, dpi=130, format="png")


def plot_bars(path: Path, title: str, bars: Mapping[str, Mapping[str, float]], axis: str) -> None:
    """Draw a horizontal bar for each name of bars, with its parts one after the other, as PNG.

    Raises OSError. axis: title of the axis, a unit. Each bar has its total, as bars may differ by orders of
    magnitude.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    with rc_context({**_STYLE, "axes.grid": False}):
        canvas = Figure(figsize=(8.4, 1.2 + 0.45 * len(bars)), layout="constrained")
        FigureCanvasAgg(canvas)
        panel = canvas.subplots()
        ends = [0.0] * len(bars)
        for part, colour in zip(parts, _COLOURS, strict=False):
            widths = [bar.get(part, 0.0) for bar in bars.values()]
            panel.barh(list(bars), widths, left=ends, label=part, color=colour, height=0.6)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for position, end in enumerate(ends):
            panel.text(end, position, f" {end:.3g} {axis}", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set(xlabel=axis)
        panel.set_title(title, fontsize=10)
        canvas.legend(loc="outside lower center", ncols=len(parts), fontsize=8)
        canvas.savefig(path, dpi=130, format="png")
