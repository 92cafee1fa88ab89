"""The figures of `gids bench bandwidth`: first iterations, and rates of each setting. Called by plot.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plotting import COLOURS, MARKERS, draw_bars, shared_settings

from gids.bench.bandwidth import PROBE
from gids.bench.report import Figure, Report

_CEILING = "disk's ceiling, single pages"
_TITLES = {"effective_bytes_per_s": "rows handed out", "device_bytes_per_s": "read from the device"}
_LINES_MAX = len(COLOURS)  # of a pair of panels; with more settings, each but the engine gets its own pair
_PAIRS_MAX = 4
_PAIR_INCHES, _ROW_INCHES, _FRAME_INCHES = 2.4, 0.42, 1.2
Setting = Mapping[str, Any]


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    return 8.0, sum(_heights(report))


def draw(report: Report, figure: Any) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=_heights(report))
    _draw_iterations(report, above)
    _draw_rates(report, below)


def _heights(report: Report) -> tuple[float, float]:
    pairs = max(1, len(_pairs(report)))
    return _FRAME_INCHES + _PAIR_INCHES * pairs, _FRAME_INCHES + _ROW_INCHES * max(1, len(_runs(report)))


def _runs(report: Report) -> list[Figure]:
    return [f for f in report.figures if f.values and f.setting["engine"] != PROBE]


def _title(report: Report, setting: Setting, keys: Sequence[str]) -> str:
    """What tells a setting from the others; of these keys."""
    shared = shared_settings(_runs(report)) - {"engine"}
    named = {"depth": "depth "}
    shown = [key for key in keys if key not in shared and setting[key] is not None]
    return ", ".join(f"{named.get(key, '')}{setting[key]}" for key in shown)


def _ceiling(report: Report, depths: set[object]) -> float | None:
    """MB/s: the most that a probe read at these depths; an extent reader's own depth is not among them."""
    probes = [f for f in report.figures if f.values and f.setting["engine"] == PROBE]
    mine = [f for f in probes if f.setting["depth"] in depths] or probes
    return max((f.median("device_bytes_per_s") or 0.0) / 1e6 for f in mine) if mine else None


def _pairs(report: Report) -> dict[str, list[dict[str, Any]]]:
    """The series of each pair of panels, by its title."""
    if len(report.series) <= _LINES_MAX:
        return {"": report.series} if report.series else {}
    found: dict[str, list[dict[str, Any]]] = {}
    for series in report.series:
        found.setdefault(_title(report, series["setting"], ("batch", "depth", "state")), []).append(series)
    return dict(list(found.items())[:: -(-len(found) // _PAIRS_MAX)])


def _draw_iterations(report: Report, figure: Any) -> None:
    pairs = _pairs(report)
    panels = figure.subplots(max(1, len(pairs)), 2, sharex=True, sharey="col", squeeze=False)
    keys = ("engine",) if len(pairs) > 1 else ("engine", "batch", "depth", "state")
    lines: dict[str, int] = {}
    handles: dict[str, Any] = {}
    for row, (pair, many) in zip(panels, pairs.items(), strict=False):
        for panel, (name, title) in zip(row, _TITLES.items(), strict=True):
            for series in many:
                label = _title(report, series["setting"], keys)
                number = lines.setdefault(label, len(lines)) % len(COLOURS)
                rates = [value / 1e6 for value in series["values"][name]]
                panel.plot(
                    range(1, len(rates) + 1),
                    rates,
                    marker=MARKERS[number],
                    color=COLOURS[number],
                    label=label,
                )
            cold = [series["setting"] for series in many if series["setting"]["state"] == "cold"]
            ceiling = _ceiling(report, {setting["depth"] for setting in cold}) if cold else None
            if ceiling is not None:
                panel.axhline(ceiling, color="black", linestyle="--", linewidth=1.1, label=_CEILING)
            panel.set_ylabel("MB/s")
            panel.set_title(f"{title}\n{pair}" if pair else title, fontsize=9)
            panel.xaxis.get_major_locator().set_params(integer=True)
            found, names = panel.get_legend_handles_labels()
            handles |= dict(zip(names, found, strict=True))
    for panel in panels[-1]:
        panel.set_xlabel("iteration, from an empty cache")
        panel.set_ylim(bottom=0)  # of the whole column
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    shown = sum(map(len, pairs.values()))
    some = f" ({shown} of {len(report.series)} settings)" if shown < len(report.series) else ""
    figure.suptitle(f"First iterations{some}", fontsize=10)


def _draw_rates(report: Report, figure: Any) -> None:
    panel = figure.subplots()
    runs = _runs(report)
    draw_bars(panel, runs, _TITLES)
    of_disk = {  # a warm run has no ceiling
        place: ceiling
        for place, run in enumerate(runs)
        if run.setting["state"] == "cold" and (ceiling := _ceiling(report, {run.setting["depth"]}))
    }
    if of_disk:
        panel.vlines(
            list(of_disk.values()),
            [place - 0.5 for place in of_disk],
            [place + 0.5 for place in of_disk],
            color="black",
            linestyle="--",
            linewidth=1.1,
            label=_CEILING,
        )
    keys = ("engine", "batch", "depth", "state")
    panel.set_yticks(range(len(runs)), [_title(report, f.setting, keys) for f in runs], fontsize=8)
    panel.set_xlabel("MB/s")
    panel.set_title("Whole run", fontsize=10)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
