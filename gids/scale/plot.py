"""The plot of `gids scale`: what a minibatch holds by its size, and an epoch by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gids.scale.curves import Curves
from gids.scale.model import MODES, Prediction

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # colour-blind safe
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4,
}


def check_plotting() -> None:
    """Raise ImportError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None


def draw(path: Path, name: str, curves: Curves, found: Sequence[Prediction]) -> None:
    """Write a PNG. Needs no display."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        canvas = Figure(figsize=(10.5, 6.2), layout="constrained")
        FigureCanvasAgg(canvas)
        panels = canvas.subplots(2, 2)
        _draw_curves(panels[0][0], curves)
        _draw_modes(panels[0][1], found, lambda p: p.seconds, "seconds per epoch")
        _draw_modes(panels[1][0], found, lambda p: p.storage_bytes / 1e9, "GB read from storage per epoch")
        _draw_modes(panels[1][1], found, lambda p: p.network_bytes / 1e9, "GB sent per epoch")
        panels[0][1].legend(fontsize=8)
        canvas.suptitle(f"{name}: {curves.setting.sampler}, batch {curves.setting.batch_size} per rank")
        canvas.savefig(path, dpi=130, format="png")


def _draw_curves(panel: Any, curves: Curves) -> None:
    sizes = [p.batch_size for p in curves.points]
    for layer in range(len(curves.setting.fanouts)):
        values = [p.nodes[layer + 1] / p.batch_size for p in curves.points]
        panel.plot(
            sizes,
            values,
            marker=_MARKERS[layer % 6],
            color=_COLOURS[layer % 6],
            label=f"{layer + 1} hop{'s' if layer else ''}",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("seeds of a minibatch")
    panel.set_ylabel("nodes per seed")
    panel.legend(fontsize=8)


def _draw_modes(
    panel: Any, found: Sequence[Prediction], value: Callable[[Prediction], float], title: str
) -> None:
    for number, mode in enumerate(MODES):
        mine = [p for p in found if p.mode == mode and value(p) > 0]
        panel.plot(
            [p.ranks for p in mine],
            [value(p) for p in mine],
            marker=_MARKERS[number],
            color=_COLOURS[number],
            label=mode,
            linewidth=1.2,
            linestyle="--" if mode == MODES[-1] else "-",  # often the same as partitioned
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sorted({p.ranks for p in found}), [f"{n}" for n in sorted({p.ranks for p in found})])
    panel.minorticks_off()
    panel.set_xlabel("ranks")
    panel.set_ylabel(title)
