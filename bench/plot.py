"""Draw a figure from JSON that `gids bench QUESTION --json FILE` or `bench/packs.py --json FILE` wrote.

    python bench/plot.py hit-ratio.json hit-ratio.png

hit-ratio: hits by window and by cache size, or pages per epoch if several samplers were measured. packs: rows
per second by memory. Other questions: a bar per row of the table. Needs matplotlib, and no display.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullLocator

from gids.bench.report import Figure, Report
from gids.bench.text import shared

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4.5,
}
POLICIES = {
    "lookahead": "lookahead",
    "window-pin": "window-pin",
    "static": "static, by heat",
    "lru": "LRU",
    "random": "random",
    "MIN": "MIN (Belady)",
}
POLICY_COLOURS = dict(zip(POLICIES, (*COLOURS[:5], "black"), strict=True))
TYPICAL_WINDOWS = {"window-pin": 8, "lookahead": 16}  # of the paper and of gids
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


def save(path: Path, size: tuple[float, float], draw: Callable[[Canvas], None]) -> None:
    """Call draw with a new figure; write it as PNG. size: width and height in inches."""
    with rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas)
        canvas.savefig(path, dpi=130, format="png")


def add_legend(canvas: Canvas, panels: Sequence[Any], columns: int) -> None:
    """Below the panels: each label once, as a panel may lack some lines."""
    shown = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8)


def spread(
    figures: Sequence[Figure], metric: str, scale: float
) -> tuple[list[float], tuple[list[float], list[float]] | None]:
    """Medians times scale, and the ranges below and above them; None if nothing was repeated."""
    values = [[scale * value for value in figure.values.get(metric, [0.0])] for figure in figures]
    middle = [median(repeats) for repeats in values]
    if all(len(repeats) == 1 for repeats in values):
        return middle, None
    low = [m - min(repeats) for m, repeats in zip(middle, values, strict=True)]
    high = [max(repeats) - m for m, repeats in zip(middle, values, strict=True)]
    return middle, (low, high)


def some_caches(figures: Sequence[Figure], most: int) -> list[str]:
    """The caches to draw: all, or some that are evenly spaced."""
    caches = list(dict.fromkeys(str(f.setting["cache"]) for f in figures))
    return caches[:: -(-len(caches) // most)]


# Reports of gids bench


def draw_bars(report: Report, path: Path) -> None:
    """A bar per row of the command's table: the median of a column, with the range over the repeats."""
    settings, (column, *_) = importlib.import_module(f"gids.bench.{report.question}").columns(report)
    figures = [figure for figure in report.figures if column.metric in figure.values]
    same = shared(figures, settings)

    def label(figure: Figure) -> str:
        values = {key: figure.setting.get(key) for key in settings if key not in same}
        return ", ".join(f"{settings[key]} {value}" for key, value in values.items() if value is not None)

    def draw(canvas: Canvas) -> None:
        panel = canvas.subplots()
        middle, ranges = spread(figures, column.metric, 1)
        bars = panel.barh(range(len(figures)), middle, xerr=ranges, capsize=2, color=COLOURS[0])
        panel.bar_label(bars, [column.show(value) for value in middle], fontsize=7, padding=2)
        panel.set_yticks(range(len(figures)), list(map(label, figures)), fontsize=8)
        panel.set_ylim(len(figures) - 0.4, -0.6)
        panel.margins(x=0.12)
        panel.xaxis.set_major_formatter(lambda value, _: column.show(value))
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(column.title)

    save(path, (8.0, 1.0 + 0.25 * len(figures)), draw)


def draw_windows(report: Report, path: Path) -> None:
    """Hits by window: a panel per cache."""
    measured = [f for f in report.figures if f.values]
    caches = some_caches(measured, 4)
    windows = sorted({int(w) for f in measured if (w := f.setting["window"]) is not None})

    def draw_panel(panel: Any, cache: str) -> None:
        for number, (policy, title) in enumerate(POLICIES.items()):
            line = [f for f in measured if (f.setting["cache"], f.setting["policy"]) == (cache, policy)]
            style = {"color": POLICY_COLOURS[policy], "label": title}
            if line and line[0].setting["window"] is None:
                # random's dashes begin where LRU's end: their levels are often the same
                dashes = (4 if policy == "random" else 0, (4, 4))
                level = 100 * (line[0].median("hit_ratio") or 0)
                panel.axhline(level, linestyle=dashes, linewidth=1.1, **style)
            elif line:
                line.sort(key=lambda f: int(f.setting["window"] or 0))
                middle, ranges = spread(line, "hit_ratio", 100)
                at = [f.setting["window"] for f in line]
                panel.errorbar(at, middle, yerr=ranges, marker=MARKERS[number], capsize=2, **style)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.set_xticks(windows)
        panel.set_xlabel("window (minibatches)")

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(1, len(caches), sharex=True, sharey=True, squeeze=False)[0]
        for panel, cache in zip(panels, caches, strict=True):
            draw_panel(panel, cache)
        if windows:
            panels[0].set_xlim(windows[0] - 1, windows[-1] + 1)
        panels[0].set_ylim(0, 105 * max(f.median("hit_ratio") or 0 for f in measured))
        panels[0].set_ylabel("pages hit (%)")
        add_legend(canvas, panels, 6)
        canvas.suptitle("Hit ratio by window depth", fontsize=10)

    save(path, (max(5.6, 2.9 * len(caches)), 3.5), draw)


def draw_advice(report: Report, path: Path) -> None:
    """Hits by cache size: a line per window."""
    measured = [f for f in report.figures if f.values]

    def draw(canvas: Canvas) -> None:
        panel = canvas.subplots()
        for number, window in enumerate(sorted({f.setting["window"] for f in measured})):
            line = [f for f in measured if f.setting["window"] == window]
            megabytes = [float(f.setting["lines"] or 0) * report.subject["page_bytes"] / 1e6 for f in line]
            hits = [100 * (f.median("hit_ratio") or 0) for f in line]
            style = {"marker": MARKERS[number % len(MARKERS)], "color": COLOURS[number % len(COLOURS)]}
            panel.plot(megabytes, hits, label=f"window {window}", **style)
        wanted = 100 * report.subject["wanted_hit_ratio"]
        panel.axhline(wanted, color="black", linestyle="--", linewidth=1.1, label="wanted")
        panel.set_xlabel("cache (MB)")
        panel.set_ylabel("pages hit (%)")
        panel.set_ylim(bottom=0)
        panel.set_title("Hit ratio by cache size, lookahead", fontsize=10)
        add_legend(canvas, [panel], 6)

    save(path, (5.6, 3.6), draw)


def sampler_groups(report: Report) -> list[tuple[object, object]]:
    """(sampler, kappa) of each group of bars; [] if there is only one."""
    measured = [f.setting for f in report.figures if "epoch_pages_read" in f.values]
    groups = dict.fromkeys((setting.get("sampler"), setting.get("kappa")) for setting in measured)
    return list(groups) if len(groups) > 1 else []


def draw_samplers(report: Report, path: Path) -> None:
    """Pages read per epoch: a panel per cache, a group of bars per sampler and kappa, a bar per policy."""
    measured = [f for f in report.figures if "epoch_pages_read" in f.values]
    groups, caches = sampler_groups(report), some_caches(measured, 3)
    windows = {policy: typical_window(measured, policy) for policy in POLICIES}
    policies = {policy: window for policy, window in windows.items() if window != ()}
    most = max(f.median("epoch_pages") or 0 for f in measured)
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    unit, unit_name = next(((unit, name) for unit, name in units if most >= 10 * unit), (1, ""))
    inches = max(5.6, 0.8 + 0.85 * len(groups))
    several = len({kappa for _, kappa in groups} - {None}) > 1
    titles = [
        f"{sampler}\nκ = {'∞' if kappa == 'inf' else kappa}"
        if several and kappa is not None
        else str(sampler)
        for sampler, kappa in groups
    ]

    def draw_panel(panel: Any, cache: str) -> None:
        bars: dict[tuple[object, ...], Figure] = {
            tuple(f.setting[key] for key in ("sampler", "kappa", "policy", "window")): f
            for f in measured
            if f.setting["cache"] == cache
        }
        width = 0.8 / len(policies)
        for number, (policy, window) in enumerate(policies.items()):
            at = [i for i, group in enumerate(groups) if (*group, policy, window) in bars]
            chosen = [bars[*groups[i], policy, window] for i in at]
            heights, ranges = spread(chosen, "epoch_pages_read", 1 / unit)
            shift = (number - (len(policies) - 1) / 2) * width
            style = {"error_kw": {"linewidth": 0.8}, "color": POLICY_COLOURS[policy]}
            label = POLICIES[policy] + ("" if window is None else f", window {window}")
            panel.bar([i + shift for i in at], heights, width * 0.92, yerr=ranges, label=label, **style)
        for i, group in enumerate(groups):  # a line over each group: the pages read without a cache
            asked = [f.median("epoch_pages") for key, f in bars.items() if key[:2] == group]
            if asked and asked[0] is not None:
                style = {"color": "black", "linestyle": ":", "linewidth": 1.2}
                label = "asked for" if i == 0 else None
                panel.hlines(asked[0] / unit, i - 0.42, i + 0.42, label=label, **style)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.grid(axis="x", visible=False)
        panel.margins(y=0.08)
        panel.set_ylabel(f"pages ({unit_name})" if unit_name else "pages")

    def draw(canvas: Canvas) -> None:
        panels = canvas.subplots(len(caches), 1, sharex=True, squeeze=False)[:, 0]
        for panel, cache in zip(panels, caches, strict=True):
            draw_panel(panel, cache)
        panels[-1].set_xticks(range(len(groups)), titles)
        canvas.suptitle("Pages read per epoch, by sampler and policy", fontsize=10)
        add_legend(canvas, panels, 2 if inches < 7 else 4)

    save(path, (inches, 1.1 + 2.3 * len(caches)), draw)


def typical_window(measured: Sequence[Figure], policy: str) -> object:
    """The window to show: the typical one or the nearest; None: the policy has none; (): not measured."""
    windows = {f.setting["window"] for f in measured if f.setting["policy"] == policy}
    if not windows or None in windows:
        return None if windows else ()
    return min(windows, key=lambda w: abs(int(w or 0) - TYPICAL_WINDOWS[policy]))


# Results of benchmarks


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
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("memory / features")

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, ((row_bytes, seeds), settings) in zip(axes, panels.items(), strict=True):
            draw_panel(axis, settings)
            axis.set_title(f"rows of {row_bytes} B, {seeds} seeds", fontsize=9)
        axes[0].set_ylabel("thousand rows per second")
        add_legend(canvas, axes, 3)

    save(path, (max(5.6, 2.7 * len(panels)), 3.6), draw)


def draw_cooperation(panels: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """panels: by graph and sampler, the rows of the first table of cooperation.py."""
    graphs, samplers = ([*dict.fromkeys(key[i] for key in panels)] for i in (0, 1))

    def draw(canvas: Canvas) -> None:
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
        add_legend(canvas, axes.flat, 2)

    save(path, (3.6 * len(samplers), 2.7 * len(graphs) + 0.7), draw)


def plot(path: Path, out: Path) -> None:
    """Raises ValueError for JSON that is neither a report of gids bench nor a result of packs.py."""
    result = json.loads(path.read_text())
    for table in result.get("tables", []):
        if table["title"] == "all settings":
            draw_packs([dict(zip(table["columns"], row, strict=True)) for row in table["rows"]], out)
            return
    if result.get("format") != "gids-bench":
        raise ValueError(f"{path} is not a report of gids bench")
    report = Report(result["question"], result["command"], subject=result["subject"])
    for figure in result["figures"]:
        values = {name: each["values"] for name, each in figure["metrics"].items()}
        report.figures.append(Figure(figure["setting"], values))
    if report.question != "hit-ratio":
        draw_bars(report, out)
    elif sampler_groups(report):
        draw_samplers(report, out)
    elif "wanted_hit_ratio" in report.subject:
        draw_advice(report, out)
    else:
        draw_windows(report, out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("figure", type=Path, metavar="FIGURE.png")
    args = parser.parse_args(arguments)
    plot(args.result, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
