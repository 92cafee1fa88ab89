"""Figures are drawn from reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gids.bench.report import Report

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import packs
import plot
from harness import Figures

HIT_RATIO = {"cache": "5% (1 MB)", "lines": 256}
REPORTS: dict[str, list[tuple[dict[str, Any], dict[str, float]]]] = {
    "hit-ratio": [
        (
            {**HIT_RATIO, "sampler": None, "kappa": None, "policy": policy, "window": window},
            {"hit_ratio": 0.5},
        )
        for policy, window in [("MIN", None), ("random", None), ("window-pin", 8), ("lookahead", 16)]
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
    "bandwidth": [
        (
            {
                "engine": "uring",
                "batch": "8 seeds",
                "depth": depth,
                "cache": "1 MB",
                "window": 16,
                "state": "cold",
            },
            {"effective_bytes_per_s": 1e9},
        )
        for depth in (64, 256)
    ],
    "epoch": [
        ({"side": side}, {"epoch_s": 2.0, "batches": 10, "sampling_s": 0.5, "training_s": 1.0})
        for side in ("gids", "stock")
    ],
}


@pytest.mark.parametrize("name", list(REPORTS))
def test_a_figure_is_drawn_from_a_report(tmp_path: Path, name: str) -> None:
    report = Report(name.partition(",")[0], ["gids"])
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


def setting(side_seconds: dict[str, float], ways: list[tuple[str, int]]) -> packs.Setting:
    """60 minibatches of 10 rows; torch loaded 6 of them. ways: (way, minibatches) of each choice of auto."""
    made = packs.Setting(row_bytes=512, share="1/4", memory_bytes=1 << 20, batch_size=8, batches=60)
    for side, seconds in side_seconds.items():
        batches = 6 if side == "torch" else 60
        run = {"seconds": seconds, "batches": batches, "rows": 10 * batches, "choices": []}
        made.runs[side] = {**run, "late_s": 1.5}
    if "auto" in made.runs:
        made.runs["auto"]["choices"] = [{"way": way, "minibatches": n} for way, n in ways]
    return made


@pytest.mark.parametrize(
    ("ways", "chosen", "regret"),
    [
        ([("pack", 60)], "pack", 1.0),
        ([("pack", 20), ("random", 40)], "random", 3.0),
        ([], "random", 3.0),
    ],
)
def test_the_choice_is_judged_by_the_demanded_ways(
    ways: list[tuple[str, int]], chosen: str, regret: float
) -> None:
    found = setting({"random": 30.0, "pack": 10.0, "auto": 10.5, "torch": 9.0}, ways)
    assert (found.chosen, found.regret()) == (chosen, regret)
    assert found.seconds("torch") == 9.0 + 54 * 1.5  # extrapolated
    assert found.rows_per_s("torch") == 600 / 90
    assert found.seconds("dgl") is None
    row = found.row()
    assert [row[f"{side} s"] for side in ("random", "pack", "auto", "torch")] == [30.0, 10.0, 10.5, 90.0]
    assert row["dgl s"] == row["pack over bound"] == "-"


def test_packs_are_drawn_without_the_sides_that_failed(tmp_path: Path) -> None:
    settings = [
        setting({"random": 3.0, "pack": 1.0, "auto": 1.1, "torch": 2.0}, [("pack", 60)]),
        setting({"random": 3.0, "auto": 3.0}, []),
    ]
    settings[1].share = "1/16"
    args = packs.parse(["--json", str(tmp_path / "packs.json")])
    Figures(args).table("all settings", [setting.row() for setting in settings])
    plot.main([str(tmp_path / "packs.json"), str(tmp_path / "packs.png")])
    assert (tmp_path / "packs.png").read_bytes().startswith(b"\x89PNG")
