"""The pictures of `gids bench --plot`: curves that coincide both show, and axes begin at 0."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gids.bench.plot import plot_curves


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_curves_that_coincide_differ_in_width(drawn, tmp_path):
    curves = [(name, [1, 10, 1000], [5, 50, 500]) for name in ("a", "b", "c")]
    plot_curves(tmp_path / "x.png", "Title", {"panel": curves}, ("size", "rows"))
    [panel] = drawn[0].axes
    assert panel.get_xlim()[0] == 0
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
    curves = {"a": [("curve", [1, 2], values)]}
    plot_curves(tmp_path / "x.png", "Title", curves, ("size", "rows"), log_y=log_y)
    [panel] = drawn[0].axes
    assert panel.get_ylabel() == label
    assert panel.get_ylim()[0] == pytest.approx(first, abs=0.05)
