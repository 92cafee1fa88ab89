"""Figures in PNG files, with matplotlib (the extra `plot`). Called by the questions' own plots.

No display is needed or looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # told apart by all
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 130


def require_matplotlib() -> None:
    """Raise ImportError, with what to install, when figures cannot be drawn: before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot draws with matplotlib, which is missing: pip install matplotlib") from None


def save_plot(path: Path, draw: Callable[[Any], None], *, width: float, height: float) -> None:
    """Draw on a new figure, inches wide and high, and write it as PNG. Raises ImportError, OSError."""
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.markersize": 4.5,
    }
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path, dpi=DPI, format="png")
