"""The plot of `gids scale`: what a minibatch holds by its size, and an epoch by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gids.bench.plot import COLOURS, MARKERS, make_logarithmic, save_plot
from gids.scale.curves import Curves
from gids.scale.model import MODES, Prediction

_VALUES: dict[str, Callable[[Prediction], float]] = {
    "time per epoch (s)": lambda p: p.seconds,
    "read from storage per epoch (GB)": lambda p: p.storage_bytes / 1e9,
    "sent per epoch (GB)": lambda p: p.network_bytes / 1e9,
}


def draw(path: Path, name: str, curves: Curves, predictions: Sequence[Prediction]) -> None:
    """Write a PNG. Needs no display."""
    values = {  # without the bytes sent, if there is one rank only
        title: value for title, value in _VALUES.items() if any(value(p) > 0 for p in predictions)
    }

    def draw_all(canvas: Any) -> None:
        panels = canvas.subplots(2, 2).flat
        _draw_curves(panels[0], curves)
        for panel, (title, value) in zip(panels[1:], values.items(), strict=False):
            _draw_modes(panel, predictions, value, title)
        for panel in panels[1 + len(values) :]:
            panel.set_visible(False)
        panels[1].legend(fontsize=8)
        canvas.suptitle(f"{name}: {curves.setting.sampler}, batch {curves.setting.batch_size} per rank")

    save_plot(path, (10.5, 6.2), draw_all)


def _draw_curves(panel: Any, curves: Curves) -> None:
    sizes = [p.batch_size for p in curves.points]
    for layer in range(len(curves.setting.fanouts)):
        panel.plot(
            sizes,
            [p.nodes[layer + 1] / p.batch_size for p in curves.points],
            marker=MARKERS[layer % len(MARKERS)],
            color=COLOURS[layer % len(COLOURS)],
            label=f"{layer + 1} hop{'s' if layer else ''}",
        )
    _set_axes(panel, sizes, "minibatch (seeds)", "nodes per seed")
    panel.legend(fontsize=8)


def _draw_modes(
    panel: Any, predictions: Sequence[Prediction], value: Callable[[Prediction], float], title: str
) -> None:
    for number, mode in enumerate(MODES):
        line = [p for p in predictions if p.mode == mode and value(p) > 0]
        panel.plot(
            [p.ranks for p in line],
            [value(p) for p in line],
            marker=MARKERS[number],
            color=COLOURS[number],
            label=mode,
            linewidth=1.2,
            linestyle="--" if mode == MODES[-1] else "-",  # often the same as partitioned
        )
    _set_axes(panel, sorted({p.ranks for p in predictions}), "ranks", title)


def _set_axes(panel: Any, sizes: Sequence[int], x_title: str, y_title: str) -> None:
    """Logarithmic axes; on the x axis a tick for each size."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.tick_params("x", which="minor", bottom=False)
    panel.set_yscale("log")
    make_logarithmic(panel.yaxis)
    panel.set_xlabel(x_title)
    panel.set_ylabel(y_title)
