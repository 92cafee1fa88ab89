"""Every benchmark runs at its small size and verifies its results. Time is not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("cache.py", ["hits"], "of MIN (target"),
        ("cache.py", ["planning", "--repeat", "1"], "ns per page (target"),
        ("cache.py", ["gather", "--repeat", "1"], "over index_select (target"),
        ("cache.py", ["heat"], "static of MIN"),
        ("cache.py", ["carry", "--repeat", "1"], "edges carried per second (target"),
        ("aggregation.py", [], "cold aggregation over torch"),
        ("dtypes.py", ["gather", "--repeat", "1"], "int8 per column: gather over that of float32"),
        ("dtypes.py", ["training"], "int8 per row, points of accuracy above float32"),
        ("convert.py", [], "peak memory of converting"),
        ("edges.py", ["--memory", "4MB", "--options", "dedup"], "10^9 edges, extrapolated"),
        ("orders.py", [], "R-MAT, trace"),
        ("epoch.py", [], "speed-up over stock as it is"),
        ("device_queue.py", [], "of Engine.read (target"),
        ("sampling.py", [], "M edges/s"),
        ("sampling.py", ["--bulk"], "us bulk: "),
        ("dependence.py", [], "of Neighbor"),
    ],
)
def test_benchmark_runs(name: str, args: list[str], said: str, tmp_path: Path) -> None:
    on_disk = name in ("aggregation.py", "convert.py", "dtypes.py", "epoch.py", "orders.py") or args[:1] == [
        "gather"
    ]
    where = ["--dir", str(tmp_path)] if on_disk else []
    done = subprocess.run(
        [sys.executable, BENCH / name, *args, "--small", *where], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
