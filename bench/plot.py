"""The figures of packs.py and cooperation.py. `gids bench QUESTION --plot FILE` draws those of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from gids.bench.plot import COLOURS, MARKERS, add_legend, make_logarithmic, save_plot

READS = {
    "random": "random reads (window)",
    "pack": "pack",
    "auto": "auto",
    "torch": "torch, MADV_RANDOM",
    "dgl": "DGL, MADV_RANDOM",
}
COOPERATION = {
    "independent rows": "independent: read",
    "cooperative rows": "cooperative: read",
    "rows sent, hash": "cooperative: received, owners by hash",
    "rows sent, community": "cooperative: received, owners by community",
}


def draw_packs(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """rows: those of the table of packs.py. A panel per row size and minibatch size."""
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: Fraction(row["memory"])):
        panels.setdefault((row["row B"], row["seeds"]), []).append(row)

    def draw_panel(axis: Any, settings: list[Mapping[str, Any]]) -> None:
        for side, colour, marker in zip(READS, COLOURS, MARKERS, strict=False):
            at = [i for i, row in enumerate(settings) if row[f"{side} rows/s"] != "-"]
            speeds = [settings[i][f"{side} rows/s"] / 1000 for i in at]
            hollow = {"linestyle": "none", "markerfacecolor": "none", "markersize": 9}
            style = {"marker": marker, "color": colour, **(hollow if side == "auto" else {})}
            if at:
                axis.plot(at, speeds, label=READS[side], **style)
        axis.set_xticks(range(len(settings)), [row["memory"] for row in settings])
        axis.set_yscale("log")
        make_logarithmic(axis.yaxis)
        axis.set_xlabel("memory / features")

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, ((row_bytes, seeds), settings) in zip(axes, panels.items(), strict=True):
            draw_panel(axis, settings)
            axis.set_title(f"rows of {row_bytes} B, {seeds} seeds", fontsize=9)
        axes[0].set_ylabel("thousand rows per second")
        add_legend(canvas, axes)

    save_plot(path, (max(5.6, 2.7 * len(panels)), 3.6), draw)


def draw_cooperation(panels: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """panels: by graph and sampler, the rows of the first table of cooperation.py."""
    graphs, samplers = ([*dict.fromkeys(key[i] for key in panels)] for i in (0, 1))

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(len(graphs), len(samplers), sharex=True, squeeze=False)
        for axis, ((graph, sampler), rows) in zip(axes.flat, panels.items(), strict=True):
            ranks = [row["P"] for row in rows]
            for (key, title), colour, marker in zip(COOPERATION.items(), COLOURS, MARKERS, strict=False):
                axis.plot(ranks, [row[key] / 1000 for row in rows], marker=marker, color=colour, label=title)
            axis.set_xscale("log", base=2)
            axis.set_xticks(ranks, [str(count) for count in ranks])
            axis.set_ylim(bottom=0)
            axis.set_title(f"{graph}, {sampler}", fontsize=9)
        for axis in axes[:, 0]:
            axis.set_ylabel("rows per rank (thousands)")
        for axis in axes[-1]:
            axis.set_xlabel("ranks")
        canvas.suptitle("Input rows per rank and step", fontsize=10)
        add_legend(canvas, axes.flat)

    save_plot(path, (3.6 * len(samplers), 2.7 * len(graphs) + 0.7), draw)
