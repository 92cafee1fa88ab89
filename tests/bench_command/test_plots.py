"""`gids bench --plot`: a picture of each question. Curves that coincide both show, and axes begin at 0."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gids.bench import bandwidth
from gids.bench.plot import plot_curves

SMALL = ("--batch-size", 8, "--fanouts", "3,3")
QUESTIONS = {
    "bandwidth": ("--rows", 100, "--iterations", 4),
    "epoch": (*SMALL, "--batches", 3),
    "hit-ratio": (*SMALL, "--batches", 20, "--cache", "5%,20%", "--windows", "0,4"),
}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figures = []
    save = Figure.savefig

    def keep(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_draws_its_results(question, dataset, bench, drawn, tmp_path, monkeypatch):
    if question == "epoch":
        pytest.importorskip("gids.dgl", exc_type=ImportError)
        from epoch_results import train_here

        train_here(monkeypatch)
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)
    path = tmp_path / "picture.png"
    bench(question, dataset, *QUESTIONS[question], "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    for panel in figure.axes:
        assert panel.get_xlim()[0] == 0
        assert panel.lines or panel.patches


def test_curves_that_coincide_differ_in_width(drawn, tmp_path):
    curves = [(name, [1, 10, 1000], [5, 50, 500]) for name in ("a", "b", "c")]
    plot_curves(tmp_path / "x.png", "Title", {"panel": curves}, ("size", "rows"))
    [panel] = drawn[0].axes
    widths = [(line.get_linewidth(), line.get_markersize()) for line in panel.lines]
    assert all(below[0] > above[0] and below[1] > above[1] for below, above in pairwise(widths))


@pytest.mark.parametrize(
    ("values", "log_y", "label", "first"),
    [
        ([10, 40], False, "rows", 0),
        ([30, 40], False, "rows, not from 0", 29.5),
        ([1, 40], True, "rows, log scale", 0.8),
    ],
)
def test_an_axis_begins_at_0_or_its_label_says_that_it_does_not(values, log_y, label, first, drawn, tmp_path):
    plot_curves(
        tmp_path / "x.png", "Title", {"a": [("curve", [1, 2], values)]}, ("size", "rows"), log_y=log_y
    )
    [panel] = drawn[0].axes
    assert panel.get_ylabel() == label
    assert panel.get_ylim()[0] == pytest.approx(first, abs=0.05)
