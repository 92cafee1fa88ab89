"""The figures of `gids bench bandwidth`: first iterations from an empty cache, and each setting's rates."""

from __future__ import annotations

from typing import Any

from gids.bench.plot import COLOURS, MARKERS
from gids.bench.report import Figure, Report

_PROBES = ("raw probe", "fio")
_CEILING = "disk's ceiling, single pages"


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    return max(7.5, 1.5 + 1.1 * len(_runs(report))), 7.2


def draw(report: Report, figure: Any) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    _draw_iterations(report, above)
    _draw_rates(report, below)


def _runs(report: Report) -> list[Figure]:
    return [f for f in report.figures if f.values and f.setting["engine"] not in _PROBES]


def _title(report: Report, setting: dict[str, Any], separator: str = ", ") -> str:
    """What tells a setting from the others."""
    runs = [dict(f.setting) for f in _runs(report)]
    parts = [str(setting["engine"])]
    for key, name in (("batch", ""), ("depth", "depth "), ("state", "")):
        if setting[key] is not None and len({run[key] for run in runs} - {None}) > 1:
            parts.append(f"{name}{setting[key]}")
    return separator.join(parts)


def _ceiling(report: Report) -> float | None:
    """MB/s: the most that a probe read."""
    found = [
        f.median("device_bytes_per_s") or 0.0
        for f in report.figures
        if f.values and f.setting["engine"] in _PROBES
    ]
    return max(found) / 1e6 if found else None


def _draw_iterations(report: Report, figure: Any) -> None:
    panels = figure.subplots(1, 2)
    names = (("effective_bytes_per_s", "rows handed out"), ("device_bytes_per_s", "read from the device"))
    for panel, (name, title) in zip(panels, names, strict=True):
        for number, series in enumerate(report.series):
            rates = [value / 1e6 for value in series["values"][name]]
            panel.plot(
                range(1, len(rates) + 1),
                rates,
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=_title(report, series["setting"]),
            )
        ceiling = _ceiling(report)
        if ceiling is not None:
            panel.axhline(ceiling, color="black", linestyle="--", linewidth=1.1, label=_CEILING)
        panel.set_xlabel("iteration, from an empty cache")
        panel.set_ylabel("MB/s")
        panel.set_ylim(bottom=0)
        panel.set_title(title, fontsize=9)
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("First iterations", fontsize=10)


def _draw_rates(report: Report, figure: Any) -> None:
    panel = figure.subplots()
    runs = _runs(report)
    for number, (name, title) in enumerate(
        (("effective_bytes_per_s", "rows handed out"), ("device_bytes_per_s", "read from the device"))
    ):
        heights = [(f.median(name) or 0.0) / 1e6 for f in runs]
        low = [h - min(f.values[name]) / 1e6 for h, f in zip(heights, runs, strict=True)]
        high = [max(f.values[name]) / 1e6 - h for h, f in zip(heights, runs, strict=True)]
        places = [i + (number - 0.5) * 0.38 for i in range(len(runs))]
        several = report.repeat > 1
        drawn = panel.bar(
            places,
            heights,
            0.36,
            yerr=[low, high] if several else None,
            color=COLOURS[number],
            label=title,
            capsize=2,
        )
        panel.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
    ceiling = _ceiling(report)
    if ceiling is not None:
        panel.axhline(ceiling, color="black", linestyle="--", linewidth=1.1, label=_CEILING)
    panel.margins(y=0.12)
    panel.set_xticks(range(len(runs)), [_title(report, dict(f.setting), "\n") for f in runs], fontsize=8)
    panel.grid(axis="x", visible=False)
    panel.set_ylabel("MB/s")
    panel.set_title("Whole run", fontsize=10)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
