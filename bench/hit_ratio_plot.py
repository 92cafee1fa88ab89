"""The figures of `gids bench hit-ratio`: hits by window, and advice by cache size. Called by plot.py."""

from __future__ import annotations

from typing import Any

from plotting import COLOURS, MARKERS, spread

from gids.bench.report import Figure, Report

_PANELS_MAX = 4
_DASHES = 4  # random's begin where LRU's end: their levels are often the same
POLICY_TITLES = {
    "lookahead": "lookahead",
    "window-pin": "window-pin",
    "static": "static, by heat",
    "lru": "LRU",
    "random": "random",
    "MIN": "MIN (Belady)",
}
POLICY_COLOURS = dict(zip(POLICY_TITLES, (*COLOURS[:5], "black"), strict=True))


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    if "wanted_hit_ratio" in report.subject:
        return 5.6, 3.6
    return max(5.6, 2.9 * len(panels_of(report.figures, _PANELS_MAX))), 3.5


def draw(report: Report, canvas: Any) -> None:
    (_draw_advice if "wanted_hit_ratio" in report.subject else _draw_windows)(report, canvas)


def panels_of(figures: list[Figure], most: int) -> list[str]:
    """The caches to draw: all, or some that are evenly spaced."""
    caches = list(dict.fromkeys(str(f.setting["cache"]) for f in figures if f.values))
    return caches[:: -(-len(caches) // most)]


def _draw_windows(report: Report, canvas: Any) -> None:
    caches = panels_of(report.figures, _PANELS_MAX)
    measured = [f for f in report.figures if f.values]
    depths = sorted({int(w) for f in measured if (w := f.setting["window"]) is not None})
    panels = canvas.subplots(1, len(caches), sharex=True, sharey=True, squeeze=False)[0]
    for panel, cache in zip(panels, caches, strict=True):
        for number, (policy, title) in enumerate(POLICY_TITLES.items()):
            found = [f for f in measured if (f.setting["cache"], f.setting["policy"]) == (cache, policy)]
            style = {"color": POLICY_COLOURS[policy], "label": title}
            if found and found[0].setting["window"] is None:
                dashes = (_DASHES if policy == "random" else 0, (_DASHES, _DASHES))
                level = 100 * (found[0].median("hit_ratio") or 0)
                panel.axhline(level, linestyle=dashes, linewidth=1.1, **style)
            elif found:
                found.sort(key=lambda f: int(f.setting["window"] or 0))
                windows = [f.setting["window"] for f in found]
                middle, ranges = spread(found, "hit_ratio", 100)
                panel.errorbar(windows, middle, yerr=ranges, marker=MARKERS[number], capsize=2, **style)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.set_xticks(depths)
        panel.set_xlabel("window (minibatches)")
    if depths:
        panels[0].set_xlim(depths[0] - 1, depths[-1] + 1)
    panels[0].set_ylim(0, 105 * max(f.median("hit_ratio") or 0 for f in measured))
    panels[0].set_ylabel("pages hit (%)")
    shown = {  # a panel of a partial report lacks some policies
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=6, fontsize=8)
    canvas.suptitle("Hit ratio by window depth", fontsize=10)


def _draw_advice(report: Report, canvas: Any) -> None:
    panel = canvas.subplots()
    measured = [f for f in report.figures if f.values]
    page_bytes = report.subject["page_bytes"]
    windows = sorted({f.setting["window"] for f in measured})  # type: ignore[type-var]
    for number, window in enumerate(windows):
        mine = [f for f in measured if f.setting["window"] == window]
        panel.plot(
            [float(f.setting["lines"] or 0) * page_bytes / 1e6 for f in mine],
            [100 * (f.median("hit_ratio") or 0) for f in mine],
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=f"window {window}",
        )
    wanted = 100 * report.subject["wanted_hit_ratio"]
    panel.axhline(wanted, color="black", linestyle="--", linewidth=1.1, label="wanted")
    panel.set_xlabel("cache (MB)")
    panel.set_ylabel("pages hit (%)")
    panel.set_ylim(bottom=0)
    panel.set_title("Hit ratio by cache size, lookahead", fontsize=10)
    canvas.legend(*panel.get_legend_handles_labels(), loc="outside right center", fontsize=8)
