"""The figures of the documentation are drawn from reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from gids.bench.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import bandwidth_plot
import plot


def plotted(run_count: int) -> tuple[Report, Any]:
    """A report of runs at two depths, cold and warm, and its figure."""
    report = Report("bandwidth", ["gids"])
    for depth in (8, 64):
        setting = {"batch": None, "depth": depth, "cache": None, "window": None, "state": "cold"}
        report.figure(engine="raw probe", **setting).add(device_bytes_per_s=depth * 1e6)
    for number in range(run_count):
        setting = {
            "engine": ("uring", "threads")[number % 2],
            "batch": f"{number // 8} seeds",
            "depth": (8, 64)[number // 2 % 2],
            "cache": "1 MB",
            "window": 16,
            "state": ("cold", "warm")[number // 4 % 2],
        }
        rates = [1e6 * (number + step) for step in range(20)]
        values = {"effective_bytes_per_s": rates, "device_bytes_per_s": rates}
        report.figure(**setting).add(**{name: found[0] for name, found in values.items()})
        report.series.append({"name": "first", "setting": setting, "values": values})
    figure = matplotlib.figure.Figure(figsize=bandwidth_plot.size(report))
    bandwidth_plot.draw(report, figure)
    return report, figure


@pytest.mark.parametrize(
    ("run_count", "panels", "said"), [(2, 2, ""), (7, 2, ""), (32, 8, " (8 of 32 settings)")]
)
def test_all_lines_of_the_figure_are_visible_and_many_settings_get_panels(
    run_count: int, panels: int, said: str
) -> None:
    report, figure = plotted(run_count)
    above, below = figure.subfigs
    assert above.get_suptitle() == f"First iterations{said}"
    assert len(above.axes) == panels
    for panel in above.axes:
        assert panel.get_ylabel() == "MB/s"
        lines = [line.get_ydata() for line in panel.lines]
        assert 0 <= panel.get_ylim()[0] <= min(map(min, lines))
        assert panel.get_ylim()[1] >= max(map(max, lines))
        colours = {(line.get_color(), line.get_marker()) for line in panel.lines}
        assert len(colours) == len(lines)  # told apart
    (bars,) = below.axes
    assert len(bars.get_yticks()) == run_count
    assert len({label.get_text() for label in bars.get_yticklabels()}) == run_count
    assert bandwidth_plot.size(report)[0] == 8  # fits on a page


HIT_RATIO = {"cache": "5% (1 MB)", "lines": 256}
REPORTS: dict[str, list[tuple[dict[str, Any], dict[str, float]]]] = {
    "hit-ratio": [
        (
            {**HIT_RATIO, "sampler": None, "kappa": None, "policy": policy, "window": window},
            {"hit_ratio": 0.5},
        )
        for policy, window in [("MIN", None), ("pinned", None), ("window-pin", 8), ("lookahead", 16)]
    ],
    "hit-ratio, samplers": [
        (
            {**HIT_RATIO, "sampler": sampler, "kappa": 1, "policy": "lookahead", "window": 16},
            {"hit_ratio": 0.5, "epoch_pages_read": 1e6, "epoch_pages": 2e6},
        )
        for sampler in ("neighbor", "labor")
    ],
    "sampling": [
        (
            {"sampler": "labor", "batch": "8 seeds", "device": "cpu", "threads": threads, "at_once": 1},
            {"nodes_per_s": 1e6, "edges_per_s": 2e6},
        )
        for threads in (1, 2)
    ],
    "epoch": [
        ({"side": side}, {"epoch_s": 2.0, "batches": 10, "sampling_s": 0.5, "training_s": 1.0})
        for side in ("gids", "stock")
    ],
}


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_figure_is_drawn_from_a_report(tmp_path: Path, name: str) -> None:
    report = Report(name.partition(",")[0], ["gids"], subject={"pinned_share": 0.4})
    for setting, metrics in REPORTS[name]:
        for value in (1.0, 1.1):
            report.figure(**setting).add(**{metric: value * most for metric, most in metrics.items()})
    report.write(tmp_path / "report.json")
    assert plot.main([str(tmp_path / "report.json"), str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_not_a_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="is not a report of gids bench"):
        plot.main([str(tmp_path / "other.json"), str(tmp_path / "figure.png")])
