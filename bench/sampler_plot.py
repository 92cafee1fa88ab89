"""The figure of `gids bench hit-ratio` with several samplers or kappas: pages per epoch. Called by plot.py.

A panel per cache, a group of bars per sampler and kappa, a bar per policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hit_ratio_plot import POLICY_COLOURS, POLICY_TITLES, panels_of
from plotting import spread

from gids.bench.report import Figure, Report

_PANELS_MAX = 3
_TYPICAL_WINDOWS = {"window-pin": 8, "lookahead": 16}  # of the paper and of gids
_METRIC = "epoch_pages_read"
_GROUP_INCHES, _LEAST_INCHES, _PANEL_INCHES, _FRAME_INCHES = 0.85, 5.6, 2.3, 1.1


def groups(report: Report) -> list[tuple[object, object]]:
    """(sampler, kappa) of each group; [] if there is only one."""
    found = dict.fromkeys((f.setting.get("sampler"), f.setting.get("kappa")) for f in _measured(report))
    return list(found) if len(found) > 1 else []


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    width = max(_LEAST_INCHES, 0.8 + _GROUP_INCHES * len(groups(report)))
    return width, _FRAME_INCHES + _PANEL_INCHES * len(panels_of(_measured(report), _PANELS_MAX))


def draw(report: Report, figure: Any) -> None:
    shown, caches = groups(report), panels_of(_measured(report), _PANELS_MAX)
    policies = {p: w for p in POLICY_TITLES if (w := _window_of(report, p)) != ()}
    unit, name = _unit(max(f.median("epoch_pages") or 0 for f in _measured(report)))
    panels = figure.subplots(len(caches), 1, sharex=True, squeeze=False)[:, 0]
    width = 0.8 / len(policies)
    for panel, cache in zip(panels, caches, strict=True):
        found: dict[tuple[object, ...], Figure] = {
            (f.setting["sampler"], f.setting["kappa"], f.setting["policy"], f.setting["window"]): f
            for f in _measured(report)
            if f.setting["cache"] == cache
        }
        for number, (policy, window) in enumerate(policies.items()):
            places = [i for i, group in enumerate(shown) if (*group, policy, window) in found]
            heights, ranges = spread([found[*shown[i], policy, window] for i in places], _METRIC, 1 / unit)
            title = POLICY_TITLES[policy] + ("" if window is None else f", window {window}")
            shift = (number - (len(policies) - 1) / 2) * width
            panel.bar(
                [i + shift for i in places],
                heights,
                width * 0.92,
                yerr=ranges,
                error_kw={"linewidth": 0.8},
                color=POLICY_COLOURS[policy],
                label=title,
            )
        _draw_asked(panel, found, shown, unit)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.grid(axis="x", visible=False)
        panel.margins(y=0.08)
        panel.set_ylabel(f"pages ({name})" if name else "pages")
    panels[-1].set_xticks(range(len(shown)), _titles(shown))
    figure.suptitle("Pages read per epoch, by sampler and policy", fontsize=10)
    columns = 2 if size(report)[0] < 7 else 4
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8
    )


def _measured(report: Report) -> list[Figure]:
    return [f for f in report.figures if _METRIC in f.values]


def _window_of(report: Report, policy: str) -> object:
    """The window to show: the typical one or the nearest; None: the policy has none; (): not measured."""
    windows = {f.setting["window"] for f in _measured(report) if f.setting["policy"] == policy}
    if not windows or None in windows:
        return None if windows else ()
    return min(windows, key=lambda w: abs(int(w or 0) - _TYPICAL_WINDOWS[policy]))


def _draw_asked(
    panel: Any, found: Mapping[tuple[object, ...], Figure], shown: list[tuple[object, object]], unit: float
) -> None:
    """A line over each group: the pages read without a cache."""
    for place, group in enumerate(shown):
        asked = [f.median("epoch_pages") for key, f in found.items() if key[:2] == group]
        if asked and asked[0] is not None:
            panel.hlines(
                asked[0] / unit,
                place - 0.42,
                place + 0.42,
                color="black",
                linestyle=":",
                linewidth=1.2,
                label="asked for" if place == 0 else None,
            )


def _unit(most: float) -> tuple[float, str]:
    """The divisor and its name."""
    for unit, name in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= 10 * unit:
            return unit, name
    return 1, ""


def _titles(shown: list[tuple[object, object]]) -> list[str]:
    several = len({kappa for _, kappa in shown} - {None}) > 1
    return [
        f"{sampler}\nκ = {'∞' if kappa == 'inf' else kappa}"
        if several and kappa is not None
        else str(sampler)
        for sampler, kappa in shown
    ]
