"""Every benchmark runs at its small size and verifies its results. Time is not checked."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gids.trace.trace_file import TracedTable, TraceWriter

BENCH = Path(__file__).parents[1] / "bench"
ON_DISK = (
    "aggregation.py",
    "convert.py",
    "distributed.py",
    "dtypes.py",
    "epoch.py",
    "orders.py",
    "packs.py",
    "pack_epochs.py",
)
"""Scripts that take --dir."""

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """run(name, *arguments): run a script in this process, which has imported torch; what it printed."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(BENCH / name), *arguments])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code  # noqa: PT017
        return capfd.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.mark.few(1)
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
        ("sampling.py", ["--temporal"], "nodes, last"),
        ("dependence.py", [], "of Neighbor"),
        ("cooperation.py", [], "rows missed per rank"),
        ("placement.py", [], "where rows come from"),
        ("distributed.py", [], "| 2 | cooperative | processes |"),
        ("packs.py", [], "rows that differ from the table: 0 of "),
        ("pack_epochs.py", ["--reads", "pack", "--hidden", "4"], "16 of 16 minibatches by packs, 0 wrong"),
    ],
)
def test_benchmark_runs(name: str, args: list[str], said: str, tmp_path: Path, run: Run) -> None:
    on_disk = name in ON_DISK or args[:1] == ["gather"]
    where = ["--dir", str(tmp_path)] if on_disk else []
    assert said in run(name, *args, "--small", *where)


def test_window_buffering_is_compared_with_pinning_on_a_recorded_trace(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    heat = np.arange(200, dtype=np.uint8)
    writer = TraceWriter(tmp_path / "t.trace", [TracedTable("feat", 200, 4096, 1, None, heat)])
    for _ in range(40):
        writer.enter([rng.permutation(200)[:10]])
    writer.finish()
    printed = run("cache.py", "hits", "--trace", str(tmp_path / "t.trace"))
    figures = dict(line.rsplit(": ", 1) for line in printed.splitlines() if ": " in line)
    assert 0 < float(figures["10 minibatches, pinned"]) < float(figures["10 minibatches, lookahead W=16"])


def test_cooperation_is_drawn(tmp_path: Path, run: Run) -> None:
    run("cooperation.py", "--small", "--only", "rows", "--plot", str(tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
