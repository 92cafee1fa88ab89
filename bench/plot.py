"""Draw a figure from the JSON that `gids bench QUESTION --json FILE` writes.

    python bench/plot.py hit-ratio.json hit-ratio.png

hit-ratio: hits by window and by cache size, or pages per epoch if several samplers were measured. Other
questions: a bar per row of the table. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hit_ratio_plot
import sampler_plot
from plotting import draw_bars, save_plot

from gids.bench.report import Figure, Report


def read_report(path: Path) -> Report:
    found = json.loads(path.read_text())
    if found.get("format") != "gids-bench":
        raise ValueError(f"{path} is not a report of gids bench")
    report = Report(found["question"], found["command"], subject=found["subject"])
    for figure in found["figures"]:
        values = {name: spread["values"] for name, spread in figure["metrics"].items()}
        report.figures.append(Figure(figure["setting"], values))
    return report


def plot(report: Report, path: Path) -> None:
    if report.question == "hit-ratio":
        module = sampler_plot if sampler_plot.groups(report) else hit_ratio_plot
        save_plot(path, lambda canvas: module.draw(report, canvas), module.size(report))
        return
    question = importlib.import_module(f"gids.bench.{report.question}")
    settings, (column, *_) = question.columns(report)
    figures = [figure for figure in report.figures if column.metric in figure.values]
    size = 8.0, 1.0 + 0.25 * len(figures)
    save_plot(path, lambda canvas: draw_bars(canvas, figures, settings, column), size)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, metavar="REPORT.json")
    parser.add_argument("figure", type=Path, metavar="FIGURE.png")
    args = parser.parse_args(arguments)
    plot(read_report(args.report), args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
