"""Reports, tables and plots."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from gids.bench.plot import plot_curves
from gids.bench.text import Column, ratio

from gids.bench import text
from gids.bench.report import Report, check_writable
from gids.cli import main

COLUMNS = [
    Column("score", "score", ratio, spread=True),
    Column("time", "time", text.seconds),
    Column("-", "missing", ratio),
]


def test_a_table_has_medians_and_ranges_and_omits_empty_columns_and_shared_settings():
    report = Report("test", ["gids"], repeat=3)
    for value in (3.0, 1.0, 2.0):
        report.figure(place="a", size=1, depth=4).add(score=value, missing=None)
    report.figure(place="a", size=2, depth=4).add(score=0.5, time=0.00123)
    report.figure(place="b", size=None, depth=4)  # was not measured
    report.note("slow")
    report.note("slow")
    settings = {"place": "place", "size": "size", "depth": "depth"}
    assert report.as_text(settings, COLUMNS).splitlines() == [
        "depth 4; seed 0; 3 repeats: medians (range)",
        "",
        "place   size                 score      time",
        "--------------------------------------------",
        "a       1      2.00 (1.00 to 3.00)         -",
        "a       2                     0.50   1.23 ms",
        "",
        "note: slow",
    ]


def test_a_table_of_one_setting_has_a_column_per_figure():
    report = Report("test", ["gids"])
    report.figure(place="a").add(score=1.0, time=0.25)
    report.figure(place="bb").add(score=22.0)
    assert report.as_text({"place": "place"}, COLUMNS).splitlines()[2:6] == [
        "place        a      bb",
        "----------------------",
        "score     1.00   22.00",
        "time    250 ms       -",
    ]


def test_a_path_that_cannot_be_written_is_refused_before_the_measurement(tmp_path):
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "kept"}
    with pytest.raises(IsADirectoryError, match="is a directory: give the name of a file in it"):
        check_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no directory .* to write x in"):
        check_writable(tmp_path / "no/x")


@pytest.mark.parametrize("path", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_json_goes_to_a_file(dataset, capsys, path):
    assert main(["bench", "bandwidth", str(dataset), "--json", path]) == 2
    assert "is not a file: give the name of a file to write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 ns"), (5e-9, "5 ns"), (12.3e-6, "12.3 us"), (0.25, "250 ms"), (3.0, "3.00 s")],
)
def test_seconds_have_a_fitting_unit(value, shown):
    assert text.seconds(value) == shown


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")
def test_curves_are_drawn_and_the_legend_fits(tmp_path, monkeypatch):
    from matplotlib.figure import Figure  # which takes half a second in each process of tests

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda *args, **options: (drawn.append(args), save(*args, **options))
    )
    curves = [(f"a long label of a curve, {number}", [1, 100], [0.02, 50]) for number in range(3)]
    panels = {"read: bytes": curves, "sent: GB": curves[:1]}
    plot_curves(tmp_path / "curves.png", "title", panels, ("ranks", ""), log_x=True, log_y=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    canvas = drawn[0][0]
    assert [panel.get_ylabel() for panel in canvas.axes] == ["bytes", "GB"]
    box = canvas.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= canvas.bbox.width


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="no matplotlib")
def test_the_command_draws_its_results(dataset, bench, tmp_path):
    path = tmp_path / "hits.png"
    options = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 20, "--cache", "5%", "--policies", "lru")
    bench("hit-ratio", dataset, *options, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_reported_with_the_command_to_install_it(dataset, bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said, _ = bench("hit-ratio", dataset, "--plot", "x.png", status=2)
    assert "--plot needs matplotlib: pip install matplotlib" in said
