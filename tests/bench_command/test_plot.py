"""Plots of reports: axes have names and units, and a report without results is not drawn."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from gids.bench import plot
from gids.bench.report import Report

CACHE = {"cache": "5% (1 MB)", "lines": 256}
SAMPLER: dict[str, Any] = {"sampler": None, "kappa": None}
Figures = list[tuple[dict[str, Any], dict[str, float]]]
REPORTS: dict[str, tuple[str, Figures, str]] = {
    "windows": (
        "hit-ratio",
        [
            (CACHE | SAMPLER | {"policy": policy, "window": window}, {"hit_ratio": 0.5})
            for policy, window in [("MIN", None), ("random", None), ("window-pin", 8), ("lookahead", 16)]
        ],
        "window (minibatches) / pages hit (%)",
    ),
    "advice": (
        "hit-ratio",
        [
            ({"cache": str(lines), "lines": lines, "policy": "lookahead", "window": 22}, {"hit_ratio": 0.5})
            for lines in (100, 200)
        ],
        "cache (MB) / pages hit (%)",
    ),
    "samplers": (
        "hit-ratio",
        [
            (
                {**CACHE, "sampler": sampler, "kappa": 1, "policy": "lookahead", "window": 16},
                {"hit_ratio": 0.5, "epoch_pages_read": 1e6, "epoch_pages": 2e7},
            )
            for sampler in ("neighbor", "labor")
        ],
        "sampler / pages (millions)",
    ),
    "sampling": (
        "sampling",
        [
            ({"sampler": "labor", "threads": threads, "at_once": 1}, {"nodes_per_s": 1e6, "edges_per_s": 2e6})
            for threads in (1, 2)
        ],
        "M nodes/s / sampler, threads",
    ),
    "bandwidth": (
        "bandwidth",
        [({"engine": "uring", "depth": depth}, {"effective_bytes_per_s": 1e9}) for depth in (64, 256)]
        + [({"engine": "raw probe", "depth": 64}, {"device_bytes_per_s": 1e9})],
        "effective MB/s / engine, depth",
    ),
    "epoch": (
        "epoch",
        [
            ({"side": side}, {"epoch_s": 2.0, "batches": 10, "sampling_s": 0.5, "training_s": 1.0})
            for side in ("gids", "stock")
        ],
        "time per minibatch (ms) / side",
    ),
}


def draw(name, path, figures=None):
    question, known, _ = REPORTS[name]
    report = Report(question, ["gids"])
    if name == "advice":
        report.subject.update(wanted_hit_ratio=0.6, page_bytes=4096)
    for setting, metrics in known if figures is None else figures:
        for share in (1.0, 1.1):
            report.figure(**setting).add(**{metric: share * value for metric, value in metrics.items()})
    module = importlib.import_module(f"gids.bench.{question.replace('-', '_')}")
    return plot.plot_report(report, *module.columns(report), path)


@pytest.fixture
def canvases(monkeypatch):
    """The figures that save_plot has drawn."""
    drawn, save = [], plot.save_plot

    def keep(path, size, draw_on):
        save(path, size, lambda canvas: (draw_on(canvas), drawn.append(canvas))[0])

    monkeypatch.setattr(plot, "save_plot", keep)
    return drawn


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_report_is_drawn_with_names_and_units_of_its_axes(tmp_path, name, canvases):
    assert draw(name, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    panel = canvases[0].axes[0]
    assert f"{panel.get_xlabel()} / {panel.get_ylabel()}" == REPORTS[name][2]


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_report_without_results_is_not_drawn(tmp_path, name):
    assert not draw(name, tmp_path / "figure.png", [(setting, {}) for setting, _ in REPORTS[name][1]])
    assert not (tmp_path / "figure.png").exists()


def test_stages_are_compared_per_minibatch(tmp_path, canvases):
    draw("epoch", tmp_path / "figure.png", [({"side": "gids"}, {"batches": 4, "training_s": 2.0})])
    assert [bar.get_x() + bar.get_width() for bar in canvases[0].axes[0].patches] == [500.0]


def test_logarithmic_axes_have_ticks_at_1_2_and_5():
    from matplotlib.figure import Figure

    panel = Figure().subplots()
    panel.set_yscale("log")
    panel.set_ylim(1, 100)
    plot.make_logarithmic(panel.yaxis)
    ticks = [f"{tick:g}" for tick in panel.get_yticks() if 1 <= tick <= 100]
    assert ticks == ["1", "2", "5", "10", "20", "50", "100"]
    assert [panel.yaxis.get_major_formatter()(value, 0) for value in (0.02, 50)] == ["0.02", "50"]


def test_a_legend_fits_in_a_narrow_figure_and_whole_numbers_have_whole_ticks(tmp_path, canvases):
    minibatches = range(1, 21)
    curves = [(f"a long label of a curve, {number}", minibatches, minibatches) for number in range(3)]
    plot.plot_curves(tmp_path / "curves.png", "title", {"cold": curves}, ("minibatch", "ms"))
    [canvas] = canvases
    [legend] = canvas.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= canvas.bbox.width
    assert all(tick == int(tick) for tick in canvas.axes[0].get_xticks())


def test_the_command_draws_its_results(dataset, bench, tmp_path):
    path = tmp_path / "hits.png"
    options = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 20, "--cache", "5%", "--policies", "lru")
    said, _ = bench("hit-ratio", dataset, *options, "--plot", path)
    assert f"written: {path}\n" in said
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_before_the_measurement(dataset, bench):
    said, report = bench("hit-ratio", dataset, "--plot", "/nowhere/hits.png", status=2)
    assert "no directory /nowhere to write hits.png in" in said
    assert not report


def test_a_missing_matplotlib_is_reported_with_the_command_to_install_it(
    dataset, bench, tmp_path, monkeypatch
):
    monkeypatch.setitem(importlib.import_module("sys").modules, "matplotlib", None)
    said, _ = bench("sampling", dataset, "--plot", tmp_path / "x.png", status=2)
    assert "--plot needs matplotlib: pip install matplotlib" in said
