"""Curves in panels, as PNG. Called by `gids bench hit-ratio`, `gids scale` and bench/.

Needs matplotlib, and no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.2,
}

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

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with rc_context(_STYLE):
        canvas = Figure(figsize=(4.2 * columns, 3.0 * rows + 0.7), layout="constrained")
        FigureCanvasAgg(canvas)
        drawn = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for panel, (name, curves) in zip(drawn, panels.items(), strict=False):
            for number, (label, x, y) in enumerate(curves):
                style = {
                    "marker": _MARKERS[number % len(_MARKERS)],
                    "color": _COLOURS[number % len(_COLOURS)],
                }
                panel.plot(x, y, label=label, **style)
            panel.set_title(name, fontsize=9)
            panel.set_xlabel(axes[0])
            panel.set_ylabel(axes[1] or name.partition(": ")[2])
            if log_x:
                _make_logarithmic(panel, "x")
            elif all(float(value).is_integer() for _, x, _ in curves for value in x):
                panel.xaxis.get_major_locator().set_params(integer=True)
            if log_y:
                _make_logarithmic(panel, "y")
        for panel in drawn[len(panels) :]:
            panel.set_visible(False)
        canvas.suptitle(title, fontsize=10)
        _add_legend(canvas, drawn[: len(panels)])
        canvas.savefig(path, dpi=130, format="png")


def _add_legend(canvas: Any, panels: Sequence[Any]) -> None:
    """Below the panels, in as many columns as fit: each label once, as a panel may lack some lines."""
    shown = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    for rows in range(1, len(shown) + 1):
        columns = -(-len(shown) // rows)
        legend = canvas.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8
        )
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()


def _make_logarithmic(panel: Any, name: str) -> None:
    """Ticks at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set(**{f"{name}scale": "log"})
    axis = getattr(panel, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}")
