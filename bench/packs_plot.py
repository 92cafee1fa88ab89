"""Draw rows per second by memory share from the JSON of bench/packs.py: a panel per row size and batch size.

    python bench/packs_plot.py packs.json packs.png

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

sys.path.insert(0, str(Path(__file__).parent))
from plotting import COLOURS, MARKERS, save_plot

_TITLES = {
    "random": "random reads (window)",
    "pack": "pack",
    "auto": "auto",
    "torch": "torch, MADV_RANDOM",
    "dgl": "DGL, MADV_RANDOM",
}
_STYLES = dict(zip(_TITLES, zip(COLOURS, MARKERS, strict=True), strict=False))


def plot(result: Mapping[str, Any], path: Path) -> None:
    panels: dict[tuple[int, int], list[Any]] = {}
    for setting in result["settings"]:
        panels.setdefault((setting["row_bytes"], setting["batch_size"]), []).append(setting)
    save_plot(path, lambda canvas: _draw(panels, canvas), (max(5.6, 2.7 * len(panels)), 3.6))


def _draw(panels: Mapping[tuple[int, int], list[Any]], canvas: Any) -> None:
    axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, ((row_bytes, batch_size), settings) in zip(axes, panels.items(), strict=True):
        settings.sort(key=lambda s: Fraction(s["memory_share"]))
        shares = [s["memory_share"] for s in settings]
        for side, title in _TITLES.items():
            places = [i for i, s in enumerate(settings) if side in s["rows_per_s"]]
            speeds = [settings[i]["rows_per_s"][side] / 1000 for i in places]
            if not speeds:
                continue
            colour, marker = _STYLES[side]
            hollow = (
                {"linestyle": "none", "markerfacecolor": "none", "markersize": 9} if side == "auto" else {}
            )
            axis.plot(places, speeds, marker=marker, color=colour, label=title, **hollow)
        axis.set_xticks(range(len(shares)), shares)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(f"rows of {row_bytes} B, {batch_size} seeds", fontsize=9)
        axis.set_xlabel("memory / features")
    axes[0].set_ylabel("thousand rows per second")
    shown = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    canvas.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, fontsize=8)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("figure", type=Path, metavar="FIGURE.png")
    args = parser.parse_args(arguments)
    plot(json.loads(args.result.read_text()), args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
