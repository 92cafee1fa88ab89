"""The figure of `gids bench epoch`: a stacked bar of stages per side. Called by plot.py."""

from __future__ import annotations

from typing import Any

from plotting import COLOURS

from gids.bench.report import Report

_STAGES = {
    "sampling": "sampling",
    "planning": "planning reads",
    "reading": "waiting for features",
    "gather": "copying features",
    "training": "training",
}


def size(_: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    return 6.4, 3.8


def draw(report: Report, figure: Any) -> None:
    panel = figure.subplots()
    sides = [f for f in report.figures if f.values]
    # By minibatch: a side that was stopped early has done fewer.
    counts = [f.median("batches") or 1.0 for f in sides]
    reached = [0.0] * len(sides)
    for number, (stage, title) in enumerate(_STAGES.items()):
        heights = [1e3 * (f.median(f"{stage}_s") or 0.0) / n for f, n in zip(sides, counts, strict=True)]
        panel.barh(range(len(sides)), heights, 0.6, left=reached, color=COLOURS[number], label=title)
        reached = [a + b for a, b in zip(reached, heights, strict=True)]
    for place, end in enumerate(reached):
        panel.text(end, place, f" {end:,.0f}", va="center", fontsize=8)
    panel.margins(x=0.1)
    panel.set_yticks(range(len(sides)), [str(f.setting["side"]).replace(", ", ",\n") for f in sides])
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.set_xlabel("milliseconds per minibatch")
    panel.set_title("Where an epoch's time goes", fontsize=10)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
