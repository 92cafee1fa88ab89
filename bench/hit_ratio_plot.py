"""The figures of `gids bench hit-ratio`: by window and by cache size, and with pinning. Called by plot.py."""

from __future__ import annotations

from typing import Any

from plotting import COLOURS, MARKERS, spread

from gids.bench.report import Figure, Report

_PANELS_MAX = 4
_DASHES = 4  # random's begin where LRU's end: their levels are often the same
POLICY_TITLES = {
    "MIN": "MIN (Belady)",
    "random": "random",
    "lru": "LRU",
    "static": "static, by heat",
    "window-pin": "window-pin",
    "lookahead": "lookahead",
}
POLICY_ORDER = ("lookahead", "window-pin", "static", "lru", "random", "MIN")
POLICY_COLOURS = dict(zip((*POLICY_ORDER, "pinned"), (*COLOURS[:5], "black", COLOURS[5]), strict=True))
_BAR_WINDOW = 8  # the depth that the paper's comparison has


def size(report: Report) -> tuple[float, float]:
    """(width, height) in inches."""
    if _advice(report):
        return 5.6, 3.6
    return max(5.6, 2.9 * min(_PANELS_MAX, len(_caches(report)))), 6.6 if _bars(report) else 3.5


def draw(report: Report, figure: Any) -> None:
    if _advice(report):
        _draw_advice(report, figure)
        return
    bars = _bars(report)
    if not bars:
        _draw_windows(report, figure)
        return
    above, below = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    _draw_windows(report, above)
    _draw_bars(report, below, bars)


def _caches(report: Report) -> list[str]:
    return list(dict.fromkeys(str(f.setting["cache"]) for f in report.figures if f.values))


def _ratios(report: Report, cache: str, policy: str) -> dict[int | None, Figure]:
    return {
        f.setting["window"]: f  # type: ignore[misc]
        for f in report.figures
        if f.values and f.setting["cache"] == cache and f.setting["policy"] == policy
    }


def _draw_windows(report: Report, figure: Any) -> None:
    caches = _caches(report)
    chosen = caches if len(caches) <= _PANELS_MAX else caches[:: -(-len(caches) // _PANELS_MAX)]
    depths = sorted({int(w) for f in report.figures if f.values and (w := f.setting["window"]) is not None})
    panels = figure.subplots(1, len(chosen), sharex=True, sharey=True, squeeze=False)[0]
    for panel, cache in zip(panels, chosen, strict=True):
        for number, policy in enumerate(POLICY_ORDER):
            found = _ratios(report, cache, policy)
            if None in found:  # a policy that sees no window
                level = 100 * (found[None].median("hit_ratio") or 0)
                panel.axhline(
                    level,
                    color=POLICY_COLOURS[policy],
                    linestyle=(_DASHES if policy == "random" else 0, (_DASHES, _DASHES)),
                    linewidth=1.1,
                    label=POLICY_TITLES[policy],
                )
            elif found:
                windows = sorted(w for w in found if w is not None)
                middle, ranges = spread([found[w] for w in windows], "hit_ratio", 100)
                panel.errorbar(
                    windows,
                    middle,
                    yerr=ranges,
                    marker=MARKERS[number],
                    color=POLICY_COLOURS[policy],
                    capsize=2,
                    label=POLICY_TITLES[policy],
                )
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.set_xticks(depths)
        panel.set_xlabel("window (minibatches)")
    if depths:
        panels[0].set_xlim(depths[0] - 1, depths[-1] + 1)
    panels[0].set_ylim(0, 105 * max(f.median("hit_ratio") or 0 for f in report.figures if f.values))
    panels[0].set_ylabel("pages hit (%)")
    shown = {  # a panel whose time did not come lacks some
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle("Hit ratio by window depth", fontsize=10)


def _bars(report: Report) -> list[str]:
    """The policies to compare; nothing unless pinning and window buffering were both measured."""
    policies = {str(f.setting["policy"]) for f in report.figures if f.values}
    if not {"pinned", "window-pin"} <= policies:
        return []
    return [p for p in ("random", "pinned", "window-pin", "lookahead") if p in policies]


def _draw_bars(report: Report, figure: Any, policies: list[str]) -> None:
    panel = figure.subplots()
    caches = _caches(report)
    width = 0.8 / len(policies)
    share = float(report.subject["pinned_share"])
    for number, policy in enumerate(policies):
        shown, places, window = [], [], None
        for place, cache in enumerate(caches):
            found = _ratios(report, cache, policy)
            if found:  # not, when the time was up before
                depths = [w for w in found if w is not None]
                window = min(depths, key=lambda w: abs(w - _BAR_WINDOW)) if depths else None
                shown.append(found[window])
                places.append(place + (number - (len(policies) - 1) / 2) * width)
        title = {
            "random": "random",
            "pinned": f"{share:.0%} pinned by heat, rest random",
        }.get(policy, f"{policy}, window {window}")
        heights, ranges = spread(shown, "hit_ratio", 100)
        drawn = panel.bar(
            places,
            heights,
            width * 0.95,
            yerr=ranges,
            capsize=2,
            color=POLICY_COLOURS[policy],
            label=title,
        )
        panel.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
    panel.margins(y=0.1)
    panel.set_xticks(range(len(caches)), caches)
    panel.grid(axis="x", visible=False)
    panel.set_xlabel("cache")
    panel.set_ylabel("pages hit (%)")
    panel.set_title("Window buffering against static pinning", fontsize=10)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


def _advice(report: Report) -> bool:
    return "wanted_hit_ratio" in report.subject


def _draw_advice(report: Report, figure: Any) -> None:
    """The caches that were looked at, by size, one line for each window that had several."""
    panel = figure.subplots()
    page_bytes = report.subject["page_bytes"]
    measured = [f for f in report.figures if f.values]
    windows = sorted({f.setting["window"] for f in measured}, reverse=True)  # type: ignore[type-var]
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
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right center", fontsize=8)
