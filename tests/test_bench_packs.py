"""The choices of packs are judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import packs


def setting(side_seconds, ways):
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
def test_the_choice_is_judged_by_the_demanded_ways(ways, chosen, regret):
    found = setting({"random": 30.0, "pack": 10.0, "auto": 10.5, "torch": 9.0}, ways)
    assert (found.chosen, found.regret()) == (chosen, regret)
    assert found.seconds("torch") == 9.0 + 54 * 1.5  # extrapolated
    assert found.rows_per_s("torch") == 600 / 90
    assert found.seconds("dgl") is None
    row = found.row()
    assert [row[f"{side} s"] for side in ("random", "pack", "auto", "torch")] == [30.0, 10.0, 10.5, 90.0]
    assert row["dgl s"] == row["pack over bound"] == "-"
