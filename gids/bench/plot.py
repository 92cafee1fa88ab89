"""The plots of `gids bench QUESTION --plot FILE`, and the style, legends and axes of all plots of gids.

Called by gids.cli.bench and gids.scale.plot. Needs matplotlib, and no display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gids.bench.report import Figure, Report
from gids.bench.text import Column, shared

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")  # colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4.5,
}
_POLICIES = {
    "lookahead": "lookahead",
    "window-pin": "window-pin",
    "static": "static, by heat",
    "lru": "LRU",
    "random": "random",
    "pinned": "40 % pinned by heat",
    "MIN": "MIN (Belady)",
}
_POLICY_COLOURS = dict(zip(_POLICIES, (*COLOURS[:6], "black"), strict=True))
_TYPICAL_WINDOWS = {"window-pin": 8, "lookahead": 16}  # of the paper and of gids
_STAGES = ("sampling", "planning", "reading", "gather", "training")


def check_plotting() -> None:
    """Raise ImportError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None


def plot_report(report: Report, settings: Mapping[str, str], columns: Sequence[Column], path: Path) -> bool:
    """Draw a report as PNG. settings, columns: of the question's table. False: it has nothing to draw.

    hit-ratio: hits by window, or by cache size with --advise, or pages per epoch if several samplers were
    measured. epoch: time by stage. Other questions: a bar per line of the table. Raises OSError.
    """
    if report.question == "hit-ratio":
        if "wanted_hit_ratio" in report.subject:
            return _plot_advice(report, path)
        return _plot_samplers(report, path) if _sampler_groups(report) else _plot_windows(report, path)
    if report.question == "epoch":
        return _plot_stages(report, columns, path)
    return _plot_bars(report, settings, columns[0], path)


def save_plot(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Call draw with a new matplotlib figure; write it as PNG. size: width and height in inches."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with rc_context(_STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        draw(canvas)
        canvas.savefig(path, dpi=130, format="png")


Curve = tuple[str, Sequence[float], Sequence[float]]
"""A label, and the values on both axes."""


def plot_curves(
    path: Path,
    title: str,
    panels: Mapping[str, Sequence[Curve]],
    axes: tuple[str, str],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw the curves of each panel as PNG.

    axes: titles of both axes, with units. An empty second one is what follows ": " in the name of a panel.
    """

    def draw(canvas: Any) -> None:
        drawn = canvas.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for panel, (name, curves) in zip(drawn.flat, panels.items(), strict=False):
            for number, (label, x, y) in enumerate(curves):
                style = {"marker": MARKERS[number % len(MARKERS)], "color": COLOURS[number % len(COLOURS)]}
                panel.plot(x, y, label=label, linewidth=1.2, **style)
            panel.set_title(name, fontsize=9)
            if log_x:
                panel.set_xscale("log")
                make_logarithmic(panel.xaxis)
            elif all(float(value).is_integer() for _, x, _ in curves for value in x):
                panel.xaxis.get_major_locator().set_params(integer=True)
            if log_y:
                panel.set_yscale("log")
                make_logarithmic(panel.yaxis)
            panel.set_xlabel(axes[0])
            panel.set_ylabel(axes[1] or name.partition(": ")[2])
        for panel in list(drawn.flat)[len(panels) :]:
            panel.set_visible(False)
        canvas.suptitle(title, fontsize=10)
        add_legend(canvas, list(drawn.flat)[: len(panels)])

    columns = min(2, len(panels))
    save_plot(path, (4.2 * columns, 3.0 * -(-len(panels) // columns) + 0.7), draw)


def add_legend(canvas: Any, panels: Sequence[Any]) -> None:
    """Below the panels, in as many columns as fit: each label once, as a panel may lack some lines."""
    shown = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    for rows in range(1, len(shown) + 1):
        columns = -(-len(shown) // rows)
        legend = canvas.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize=8
        )
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()


def make_logarithmic(axis: Any) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, for an axis whose scale is already logarithmic."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}")


def _spread(
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


def _draw_names(panel: Any, names: Sequence[str]) -> None:
    """The names of horizontal bars, the first one on top."""
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.grid(axis="y", visible=False)


def _plot_bars(report: Report, settings: Mapping[str, str], column: Column, path: Path) -> bool:
    """A bar per line of the command's table: the median of a column, with the range over the repeats."""
    figures = [figure for figure in report.figures if column.metric in figure.values]
    same = shared(figures, settings)
    keys = [k for k in settings if k not in same and any(f.setting.get(k) is not None for f in figures)]
    names = [", ".join(str(f.setting[k]) for k in keys if f.setting.get(k) is not None) for f in figures]

    def draw(canvas: Any) -> None:
        panel = canvas.subplots()
        middle, ranges = _spread(figures, column.metric, 1)
        bars = panel.barh(range(len(figures)), middle, xerr=ranges, capsize=2, color=COLOURS[0])
        panel.bar_label(bars, [column.show(value) for value in middle], fontsize=7, padding=2)
        panel.xaxis.set_major_formatter(lambda value, _: column.show(value))
        panel.set_xlabel(column.title)
        panel.set_ylabel(", ".join(settings[k] for k in keys))
        _draw_names(panel, names)

    if figures:
        save_plot(path, (8.0, 1.0 + 0.25 * len(figures)), draw)
    return bool(figures)


def _plot_stages(report: Report, columns: Sequence[Column], path: Path) -> bool:
    """Time of a minibatch by stage: a bar per side. Sides may have trained on different numbers of them."""
    figures = report.measured
    titles = {column.metric: column.title for column in columns}

    def draw(canvas: Any) -> None:
        panel = canvas.subplots()
        ends = [0.0] * len(figures)
        for stage, colour in zip(_STAGES, COLOURS, strict=False):
            metric = f"{stage}_s"
            lengths = [1e3 * (f.median(metric) or 0) / (f.median("batches") or 1) for f in figures]
            if any(lengths):
                panel.barh(range(len(figures)), lengths, left=ends, color=colour, label=titles[metric])
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        panel.set_xlabel("time per minibatch (ms)")
        panel.set_ylabel("side")
        _draw_names(panel, [str(figure.setting["side"]) for figure in figures])
        add_legend(canvas, [panel])

    if figures:
        save_plot(path, (8.0, 1.5 + 0.35 * len(figures)), draw)
    return bool(figures)


def _some_caches(figures: Sequence[Figure], most: int) -> list[str]:
    """The caches to draw: all, or some that are evenly spaced."""
    caches = list(dict.fromkeys(str(f.setting["cache"]) for f in figures))
    return caches[:: -(-len(caches) // most)]


def _plot_windows(report: Report, path: Path) -> bool:
    """Hits by window: a panel per cache."""
    measured = report.measured
    if not measured:
        return False
    caches = _some_caches(measured, 4)
    windows = sorted({int(w) for f in measured if (w := f.setting["window"]) is not None})

    def draw_panel(panel: Any, cache: str) -> None:
        for number, (policy, title) in enumerate(_POLICIES.items()):
            line = [f for f in measured if (f.setting["cache"], f.setting["policy"]) == (cache, policy)]
            style = {"color": _POLICY_COLOURS[policy], "label": title}
            if line and line[0].setting["window"] is None:
                # random's dashes begin where LRU's end: their levels are often the same
                dashes = (4 if policy == "random" else 0, (4, 4))
                level = 100 * (line[0].median("hit_ratio") or 0)
                panel.axhline(level, linestyle=dashes, linewidth=1.1, **style)
            elif line:
                line.sort(key=lambda f: int(f.setting["window"] or 0))
                middle, ranges = _spread(line, "hit_ratio", 100)
                depths = [f.setting["window"] for f in line]
                panel.errorbar(depths, middle, yerr=ranges, marker=MARKERS[number], capsize=2, **style)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.set_xticks(windows)
        panel.set_xlabel("window (minibatches)")

    def draw(canvas: Any) -> None:
        panels = canvas.subplots(1, len(caches), sharex=True, sharey=True, squeeze=False)[0]
        for panel, cache in zip(panels, caches, strict=True):
            draw_panel(panel, cache)
        if windows:
            panels[0].set_xlim(windows[0] - 1, windows[-1] + 1)
        panels[0].set_ylim(0, max(1, 105 * max(f.median("hit_ratio") or 0 for f in measured)))
        panels[0].set_ylabel("pages hit (%)")
        add_legend(canvas, panels)
        canvas.suptitle("Hit ratio by window", fontsize=10)

    save_plot(path, (max(5.6, 2.9 * len(caches)), 3.5), draw)
    return True


def _plot_advice(report: Report, path: Path) -> bool:
    """Hits by cache size: a line per window."""
    if not report.measured:
        return False
    lines: dict[int, list[tuple[float, float]]] = {}
    for f in report.measured:
        megabytes = float(f.setting["lines"] or 0) * report.subject["page_bytes"] / 1e6
        point = (megabytes, 100 * (f.median("hit_ratio") or 0))
        lines.setdefault(int(f.setting["window"] or 0), []).append(point)
    curves: list[Curve] = [
        (f"window {window}", [x for x, _ in points], [y for _, y in points])
        for window, points in sorted(lines.items())
    ]
    sizes = [x for points in lines.values() for x, _ in points]
    wanted = 100 * report.subject["wanted_hit_ratio"]
    curves.append(("wanted", [min(sizes), max(sizes)], [wanted, wanted]))
    plot_curves(path, "Hit ratio by cache size", {"lookahead": curves}, ("cache (MB)", "pages hit (%)"))
    return True


def _with_epochs(report: Report) -> list[Figure]:
    return [f for f in report.figures if "epoch_pages_read" in f.values]


def _sampler_groups(report: Report) -> list[tuple[object, object]]:
    """(sampler, kappa) of each group of bars; [] if there is only one."""
    groups = dict.fromkeys((f.setting.get("sampler"), f.setting.get("kappa")) for f in _with_epochs(report))
    return list(groups) if len(groups) > 1 else []


def _typical_window(figures: Sequence[Figure], policy: str) -> object:
    """The window to show: the typical one or the nearest; None: the policy has none; (): not measured."""
    windows = {f.setting["window"] for f in figures if f.setting["policy"] == policy}
    if not windows or None in windows:
        return None if windows else ()
    return min(windows, key=lambda window: abs(int(window or 0) - _TYPICAL_WINDOWS[policy]))


def _plot_samplers(report: Report, path: Path) -> bool:
    """Pages read per epoch: a panel per cache, a group of bars per sampler and kappa, a bar per policy."""
    measured, groups = _with_epochs(report), _sampler_groups(report)
    caches = _some_caches(measured, 3)
    windows = {policy: _typical_window(measured, policy) for policy in _POLICIES}
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
            drawn = [i for i, group in enumerate(groups) if (*group, policy, window) in bars]
            chosen = [bars[*groups[i], policy, window] for i in drawn]
            heights, ranges = _spread(chosen, "epoch_pages_read", 1 / unit)
            shift = (number - (len(policies) - 1) / 2) * width
            style = {"error_kw": {"linewidth": 0.8}, "color": _POLICY_COLOURS[policy]}
            label = _POLICIES[policy] + ("" if window is None else f", window {window}")
            panel.bar([i + shift for i in drawn], heights, width * 0.92, yerr=ranges, label=label, **style)
        for i, group in enumerate(groups):  # a line over each group: the pages read without a cache
            asked = [f.median("epoch_pages") for key, f in bars.items() if key[:2] == group]
            if asked and asked[0] is not None:
                line = {"color": "black", "linestyle": ":", "linewidth": 1.2}
                label = "" if i else "asked for"
                panel.hlines(asked[0] / unit, i - 0.42, i + 0.42, label=label, **line)
        panel.set_title(f"cache {cache}", fontsize=9)
        panel.grid(axis="x", visible=False)
        panel.margins(y=0.08)
        panel.set_ylabel(f"pages ({unit_name})" if unit_name else "pages")

    def draw(canvas: Any) -> None:
        panels = canvas.subplots(len(caches), 1, sharex=True, squeeze=False)[:, 0]
        for panel, cache in zip(panels, caches, strict=True):
            draw_panel(panel, cache)
        panels[-1].set_xticks(range(len(groups)), titles)
        panels[-1].set_xlabel("sampler")
        canvas.suptitle("Pages read per epoch, by sampler and policy", fontsize=10)
        add_legend(canvas, panels)

    save_plot(path, (inches, 1.1 + 2.3 * len(caches)), draw)
    return True
