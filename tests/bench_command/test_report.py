"""Reports and tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from datasets import write_dataset

from gids.bench import text
from gids.bench.report import Report, check_writable
from gids.bench.text import Column, ratio, shared, table
from gids.cli import main
from gids.cli.bench import _hand_over


def test_the_table_is_printed_if_the_disk_is_full(capsys):
    report = Report("test", ["gids"])
    report.figure(place="a").add(score=3.0)

    class Question:
        SETTINGS, COLUMNS = {"place": "place"}, [Column("score", "score", ratio)]

    args = argparse.Namespace(json=Path("/dev/full"), plot=None, quiet=True)
    with pytest.raises(OSError, match="No space left"):
        _hand_over(args, Question, report)
    assert "3.00" in capsys.readouterr().out


def test_a_table_has_medians_and_ranges_and_omits_empty_columns():
    report = Report("test", ["gids"])
    for value in (3.0, 1.0, 2.0):
        report.figure(place="a", size=1).add(score=value, missing=None)
    report.figure(place="a", size=2).add(score=0.5, time=0.00123)
    report.figure(place="b", size=None)  # was not measured
    columns = [
        Column("score", "score", ratio, spread=True),
        Column("time", "time", text.seconds),
        Column("-", "missing", ratio),
    ]
    assert table(report.figures, {"place": "place", "size": "size"}, columns).splitlines() == [
        "place   size                 score      time",
        "--------------------------------------------",
        "a       1      2.00 (1.00 to 3.00)         -",
        "        2                     0.50   1.23 ms",
    ]


def test_an_upright_table_has_a_column_per_figure():
    report = Report("test", ["gids"])
    report.figure(place="a").add(score=1.0, time=0.25)
    report.figure(place="bb").add(score=22.0)
    columns = [Column("score", "score", ratio), Column("time", "time", text.seconds)]
    assert table(report.figures, {"place": "place"}, columns, upright=True).splitlines() == [
        "place        a      bb",
        "----------------------",
        "score     1.00   22.00",
        "time    250 ms       -",
    ]


def test_shared_settings_are_found():
    report = Report("test", ["gids"])
    report.figure(place="a", size=None, depth=4, kind="x").add(score=1)
    report.figure(place="a", size=2, depth=4, kind="y").add(score=1)
    report.figure(place="a", size=3, depth=4, kind="y")  # was not measured
    titles = {key: key for key in ("place", "size", "depth", "kind")}
    assert shared(report.figures, titles) == {"size": 2, "depth": 4}


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_an_open_file_gets_the_report_where_it_is(tmp_path, folder):
    with open(tmp_path / "out", "w") as out:
        print("before", file=out, flush=True)
        path = Path(folder, str(out.fileno()))
        check_writable(path)
        Report("test", ["gids"]).write(path)
        print("after", file=out)
    before, *report, after = (tmp_path / "out").read_text().splitlines()
    assert (before, json.loads("".join(report))["question"], after) == ("before", "test", "after")


def test_a_file_that_is_open_for_reading_or_not_at_all_is_refused_before_the_measurement(tmp_path):
    (tmp_path / "in").touch()
    with open(tmp_path / "in") as file:
        for number in (file.fileno(), 99_999, 10**20):
            with pytest.raises(PermissionError, match=f"/dev/fd/{number} cannot be written"):
                check_writable(Path(f"/dev/fd/{number}"))


def test_a_report_is_written_and_commands_end_without_a_stdout(tmp_path, monkeypatch):
    """As in `gids … >&-`."""
    monkeypatch.setattr("sys.stdout", None)
    Report("test", ["gids"]).write(tmp_path / "new")
    assert json.loads((tmp_path / "new").read_text())["question"] == "test"
    assert main(["info", str(write_dataset(tmp_path / "a.gids"))]) == 0


def test_checking_a_path_does_not_change_the_file(tmp_path):
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old": "kept"}
    with pytest.raises(IsADirectoryError, match="is a directory: give the name of a file in it"):
        check_writable(tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 ns"), (5e-9, "5 ns"), (12.3e-6, "12.3 us"), (0.25, "250 ms"), (3.0, "3.00 s")],
)
def test_seconds_have_a_fitting_unit(value, shown):
    assert text.seconds(value) == shown
