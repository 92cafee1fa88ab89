"""Curves and stacked bars, as PNG. Called by `gids bench` and the scripts of bench/. Needs matplotlib, and no
display.

An axis begins at 0, or its label says that it does not. Each curve is thinner than the one before it and has
smaller markers, so that two that coincide both show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
_WIDTHS, _MARKER_SIZES = (2.8, 0.9), (7.0, 2.8)  # of the first curve and the last one, in points
_NARROW = 0.4  # an axis begins at 0 unless its least value is a larger share of its greatest
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

    axes: titles of both axes, with units. The panels have the same y axis. If its title is empty, each has
    its own, with what follows ": " in the name of the panel.
    """
    columns = min(len(panels), 2 if len(panels) % 3 else 3)
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(label for curves in panels.values() for label, _, _ in curves))
    handles: dict[str, Any] = {}  # each label once, as a panel may lack some curves
    with _canvas(path, title, (4.2 * columns, 3.0 * rows + 0.7)) as canvas:
        drawn = list(canvas.subplots(rows, columns, squeeze=False, sharey=bool(axes[1])).flat)
        for panel, (name, curves) in zip(drawn, panels.items(), strict=False):
            for label, x, y in curves:
                style = _style(labels.index(label), len(labels))  # a label looks alike in all panels
                handles.setdefault(label, *panel.plot(x, y, label=label, **style))
            panel.set_title(name, fontsize=9)
        for panel, name in zip(drawn, panels, strict=False):
            _scale(panel, "x", axes[0], log_x)
            _scale(panel, "y", axes[1] or name.partition(": ")[2], log_y)
        for number, panel in enumerate(drawn):
            panel.set_visible(number < len(panels))
            if axes[1] and number % columns:  # the first of the row has it
                panel.set_ylabel("")
        per_line = max(1, columns * _LABELS // (8 + max(map(len, handles), default=0)))
        canvas.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=per_line, fontsize=8
        )


def plot_bars(path: Path, title: str, bars: Mapping[str, Mapping[str, float]], axis: str) -> None:
    """Draw a horizontal bar for each name of bars, with its parts one after the other, as PNG.

    Raises OSError. axis: title of the axis, a unit. Each bar has its total, as bars may differ by orders of
    magnitude.
    """
    parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    with _canvas(path, title, (8.4, 1.2 + 0.45 * len(bars))) as canvas:
        panel = canvas.subplots()
        panel.grid(visible=False)
        ends = [0.0] * len(bars)
        for part, colour in zip(parts, _COLOURS, strict=False):
            widths = [bar.get(part, 0.0) for bar in bars.values()]
            panel.barh(list(bars), widths, left=ends, label=part, color=colour, height=0.6)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for position, end in enumerate(ends):
            total = f"{end:,.0f}" if end >= 100 else f"{end:.3g}"
            panel.text(end, position, f" {total} {axis}", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set(xlabel=axis)
        canvas.legend(loc="outside lower center", ncols=len(parts), fontsize=8)


@contextmanager
def _canvas(path: Path, title: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure of so many inches, written to path at the end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        canvas = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        canvas.suptitle(title, fontsize=10)
        yield canvas
        canvas.savefig(path, dpi=130, format="png")


def _style(number: int, count: int) -> dict[str, Any]:
    """Of curve `number` of `count`."""
    thinner = number / max(1, count - 1)
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linewidth": _WIDTHS[0] + thinner * (_WIDTHS[1] - _WIDTHS[0]),
        "markersize": _MARKER_SIZES[0] + thinner * (_MARKER_SIZES[1] - _MARKER_SIZES[0]),
        "clip_on": False,  # markers on an axis
    }


def _scale(panel: Any, name: str, label: str, log: bool) -> None:
    """Label an axis, x or y, whose curves are drawn, and choose where it begins."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis = getattr(panel, f"{name}axis")
    least, greatest = axis.get_view_interval()
    if log:
        label = f"{label}, log scale"
        panel.set(**{f"{name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    elif least > _NARROW * greatest:
        label = f"{label}, not from 0"
    else:
        panel.set(**{f"{name}lim": (0, None)})
    panel.set(**{f"{name}label": label})
