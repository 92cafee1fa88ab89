"""The figure of `gids bench sampling`: nodes and edges per second of each setting. Called by plot.py."""

from __future__ import annotations

from typing import Any

from plotting import draw_bars, shared_settings

from gids.bench.report import Figure, Report, Setting


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    return 7.2, 1.1 + 0.28 * len(_runs(report))


def draw(report: Report, figure: Any) -> None:
    runs = _runs(report)
    panels = figure.subplots(1, 2, sharey=True)
    metrics = {"nodes_per_s": "input nodes", "edges_per_s": "edges"}
    for number, (panel, (name, title)) in enumerate(zip(panels, metrics.items(), strict=True)):
        draw_bars(panel, runs, {name: title}, first_colour=number)
        panel.set_xlabel(f"million {title} a second")
    shared = shared_settings(runs) - {"sampler"}
    panels[0].set_yticks(range(len(runs)), [_title(run.setting, shared) for run in runs], fontsize=8)
    figure.suptitle("Sampling", fontsize=10)


def _title(setting: Setting, shared: set[str]) -> str:
    """What tells a run from the others. shared: what it need not say."""
    parts = {
        "sampler": setting["sampler"],
        "batch": setting["batch"],
        "threads": None if (count := setting["threads"]) is None else f"{count} thread{'s' * (count != 1)}",
        "at_once": f"{setting['at_once']} at once",
    }
    return ", ".join(str(part) for key, part in parts.items() if part is not None and key not in shared)


def _runs(report: Report) -> list[Figure]:
    return [f for f in report.figures if f.values]
