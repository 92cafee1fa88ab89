"""Reports and their tables."""

from __future__ import annotations

import pytest

from gids.bench.report import Column, Report, check_writable, ratio, seconds
from gids.cli import main

COLUMNS = [
    Column("score", "score", ratio),
    Column("time", "time", seconds),
    Column("-", "missing", ratio),
]


def test_a_table_omits_empty_columns():
    report = Report("test", ["gids"])
    report.add({"place": "a", "size": 1}, {"score": 2.0, "missing": None})
    report.add({"place": "b", "size": None}, {"score": 0.5, "time": 0.00123})
    report.note("slow")
    report.note("slow")
    assert report.as_text({"place": "place", "size": "size"}, COLUMNS).splitlines() == [
        "seed 0",
        "",
        "place   size   score      time",
        "------------------------------",
        "a       1       2.00         -",
        "b       -       0.50   1.23 ms",
        "",
        "note: slow",
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


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_json_goes_to_a_file(dataset, capsys, path):
    assert main(["bench", "bandwidth", str(dataset), "--json", path]) == 2
    assert "is not a file: give the name of a file to write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 ns"), (5e-9, "5 ns"), (12.3e-6, "12.3 us"), (0.25, "250 ms"), (3.0, "3.00 s")],
)
def test_seconds_have_a_fitting_unit(value, shown):
    assert seconds(value) == shown
