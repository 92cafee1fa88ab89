"""Draw the figures of the documentation from the JSON that `gids bench QUESTION --json FILE` writes.

    python bench/plot.py hit-ratio.json hit-ratio.png

bandwidth: the first iterations and the rates of each setting. hit-ratio: by window and by cache size; pages
per epoch if several samplers were measured. sampling: nodes and edges per second. epoch: time by stage.
`gids bench --plot` draws simple bars; this script needs the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))
import bandwidth_plot
import epoch_plot
import hit_ratio_plot
import sampler_plot
import sampling_plot

from gids.bench.plot import save_plot
from gids.bench.report import Figure, Report


def read_report(path: Path) -> Report:
    found = json.loads(path.read_text())
    if found.get("format") != "gids-bench":
        raise ValueError(f"{path} is not a report of gids bench")
    report = Report(found["question"], found["command"], subject=found["subject"], series=found["series"])
    for figure in found["figures"]:
        values = {name: spread["values"] for name, spread in figure["metrics"].items()}
        report.figures.append(Figure(figure["setting"], values))
    return report


def module_for(report: Report) -> ModuleType:
    if report.question == "hit-ratio":
        return sampler_plot if sampler_plot.groups(report) else hit_ratio_plot
    return {"bandwidth": bandwidth_plot, "epoch": epoch_plot, "sampling": sampling_plot}[report.question]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, metavar="REPORT.json")
    parser.add_argument("figure", type=Path, metavar="FIGURE.png")
    args = parser.parse_args(arguments)
    report = read_report(args.report)
    module = module_for(report)
    width, height = module.size(report)
    save_plot(args.figure, lambda figure: module.draw(report, figure), width=width, height=height)
    return 0


if __name__ == "__main__":
    sys.exit(main())
