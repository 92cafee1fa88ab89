"""Plots: axes have names and units, and whole or logarithmic ticks; the legend fits."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from gids.bench.hit_ratio import plot
from gids.bench.plot import plot_curves
from gids.bench.report import Report

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture
def canvases(monkeypatch):
    """The figures that were drawn."""
    from matplotlib.figure import Figure  # which takes half a second in each process of tests

    drawn, save = [], Figure.savefig

    def keep(canvas, *args, **options):
        save(canvas, *args, **options)
        drawn.append(canvas)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def test_hits_are_drawn_by_window_with_a_level_for_policies_without_one(tmp_path, canvases):
    report = Report("hit-ratio", ["gids"])
    for policy, window, ratio in (("MIN", None, 0.5), ("lookahead", 8, 0.3), ("lookahead", 16, 0.4)):
        for cache in ("5% (1 MB)", "10% (2 MB)"):
            report.figure(cache=cache, policy=policy, window=window).add(hit_ratio=ratio)
    report.figure(cache="5% (1 MB)", policy="lru", window=None)  # was not measured
    plot(report, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    panels = canvases[0].axes
    assert [panel.get_title() for panel in panels] == ["cache 5% (1 MB)", "cache 10% (2 MB)"]
    assert (panels[0].get_xlabel(), panels[0].get_ylabel()) == ("window (minibatches)", "pages hit (%)")
    lines = {line.get_label(): line.get_xydata().tolist() for line in panels[0].lines}
    assert lines == {"MIN": [[8, 50], [16, 50]], "lookahead": [[8, 30], [16, 40]]}


def test_logarithmic_axes_have_ticks_at_1_2_and_5(tmp_path, canvases):
    panels = {"read: bytes": [("ours", [1, 100], [0.02, 50])], "sent: GB": [("ours", [1, 2], [1, 2])]}
    plot_curves(tmp_path / "curves.png", "title", panels, ("ranks", ""), log_x=True, log_y=True)
    first, second = canvases[0].axes
    assert [tick for tick in first.get_xticks() if 1 <= tick <= 100] == [1, 2, 5, 10, 20, 50, 100]
    assert [first.yaxis.get_major_formatter()(value, 0) for value in (0.02, 50)] == ["0.02", "50"]
    assert [first.get_ylabel(), second.get_ylabel()] == ["bytes", "GB"]


def test_a_legend_fits_in_a_narrow_figure_and_whole_numbers_have_whole_ticks(tmp_path, canvases):
    minibatches = range(1, 21)
    curves = [(f"a long label of a curve, {number}", minibatches, minibatches) for number in range(3)]
    plot_curves(tmp_path / "curves.png", "title", {"cold": curves}, ("minibatch", "ms"))
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


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--plot", "/nowhere/hits.png"], "no directory /nowhere to write hits.png in"),
        (["--sampler", "labor,walk"], "--plot draws one trace: give one --sampler"),
        (["--advise", "60%"], "remove --plot"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_measurement(dataset, bench, tmp_path, options, cause):
    said, report = bench("hit-ratio", dataset, "--plot", tmp_path / "hits.png", *options, status=2)
    assert cause in said
    assert not report


def test_a_missing_matplotlib_is_reported_with_the_command_to_install_it(
    dataset, bench, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said, _ = bench("hit-ratio", dataset, "--plot", tmp_path / "x.png", status=2)
    assert "--plot needs matplotlib: pip install matplotlib" in said
