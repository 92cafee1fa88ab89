"""The figure of cooperation.py: rows per rank by the number of ranks. A panel per graph and sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plotting import COLOURS, MARKERS, save_plot

_LINES = {
    "independent": ("independent rows", "independent: read"),
    "cooperative": ("cooperative rows", "cooperative: read"),
    "hash": ("rows sent, hash", "cooperative: received, owners by hash"),
    "community": ("rows sent, community", "cooperative: received, owners by community"),
}
_PANEL_INCHES = (3.6, 2.7)


def draw_to(path: Path, result: Mapping[str, Any], graphs: Sequence[str], samplers: Sequence[str]) -> None:
    size = (_PANEL_INCHES[0] * len(samplers), _PANEL_INCHES[1] * len(graphs) + 0.7)
    save_plot(path, lambda figure: _draw(figure, result, graphs, samplers), size)


def _draw(figure: Any, result: Mapping[str, Any], graphs: Sequence[str], samplers: Sequence[str]) -> None:
    panels = figure.subplots(len(graphs), len(samplers), sharex=True, squeeze=False)
    for row, graph in zip(panels, graphs, strict=True):
        for panel, sampler in zip(row, samplers, strict=True):
            counted = result[graph][sampler]["rows"]
            ranks = [line["P"] for line in counted]
            for (key, title), colour, marker in zip(_LINES.values(), COLOURS, MARKERS, strict=False):
                thousands = [line[key] / 1000 for line in counted]
                panel.plot(ranks, thousands, marker=marker, color=colour, label=title)
            panel.set_xscale("log", base=2)
            panel.set_xticks(ranks, [str(count) for count in ranks])
            panel.set_ylim(bottom=0)
            panel.set_title(f"{graph}, {sampler}", fontsize=9)
        row[0].set_ylabel("rows per rank (thousands)")
    for panel in panels[-1]:
        panel.set_xlabel("ranks")
    figure.suptitle("Input rows per rank and step", fontsize=10)
    handles, titles = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=2, fontsize=8)
