"""Every benchmark runs at its small size and verifies its results. Time is not checked."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from epoch_results import train_here

BENCH = Path(__file__).parents[1] / "bench"
IN_MEMORY = (
    "cooperation.py",
    "dependent.py",
    "labor.py",
    "matrix_sampling.py",
    "paper_sizes.py",
    "placement.py",
    "sampling.py",
)
"""Scripts without --dir."""

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch, capfd):
    """run(name, *arguments): run a script in this process, which has imported torch; what it printed."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [str(BENCH / name), *arguments])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code  # noqa: PT017
        return capfd.readouterr().out

    yield run
    torch.set_num_threads(threads)


CASES = [
    ("cache.py", ["hits"], "lookahead W=20 of MIN"),
    ("cache.py", ["planning"], "ns per page ("),
    ("cache.py", ["gather"], "int8 per column: gather over that of float32"),
    ("rows.py", ["mapped"], "mapped, 4096 B, gids over mapped, 2 threads"),
    ("rows.py", ["pyg"], "epoch of PyG, 512 B, gids, packs over PyG, MADV_RANDOM, 2 workers"),
    (
        "rows.py",
        ["memory", "--plot"],
        "memory for 1 of the features, DGL on a map, MADV_RANDOM",
    ),
    ("training.py", ["dtypes"], "points from float32"),
    ("training.py", ["samplers"], "Labor, κ = 256, nested, pages read in the last epoch"),
    ("convert.py", ["features"], "peak memory of converting"),
    ("convert.py", ["edges", "--memory", "4MB", "--options", "dedup"], "10^9 edges, extrapolated"),
    ("epoch.py", ["--plot"], "stock, MADV_RANDOM: aggregation"),
    ("epoch.py", ["--hetero"], "papers and authors: rows/s, gids over stock, MADV_RANDOM"),
    ("full_size.py", [], "epoch over DGL on a map, MADV_RANDOM"),
    (
        "full_size.py",
        ["--typed", "--steps", "generate", "torch"],
        "rows that differ from the formula: 0 (",
    ),
    ("accesses.py", [], "reads for 95 % of the peak, by the model"),
    ("paper_sizes.py", [], "IGB-Full: features: 98."),
    ("device_queue.py", [], "random pages, queue over engine"),
    ("io.py", [], "random reads, threads"),
    ("sampling.py", [], "labor, 1 thread, gids over dgl, edges/s"),
    ("sampling.py", ["--log2-nodes", "10,12"], "2^12 nodes, neighbor, 2 threads, gids over dgl"),
    ("sampling.py", ["--temporal"], "nodes, last over uniform, edges/s"),
    ("matrix_sampling.py", [], "LADIES by degree, 4 in bulk: time by matrices over gids"),
    ("cooperation.py", ["--plot"], "1.5D with adjacency rows, words of a bulk"),
    ("placement.py", [], "where rows come from"),
    ("loading.py", ["cold", "--plot"], "torch, MADV_RANDOM, over gids, window 16: first minibatch"),
    ("loading.py", ["windows"], "window-pin, W = 4, over random: hits"),
    ("loading.py", ["buffer"], "none over 20 %, reverse PageRank: bytes read"),
    ("loading.py", ["memory"], "over"),  # "disks" limits this process
    ("accumulator.py", [], "8 seeds, the rule over twice the queue: rows/s"),
    ("ranks.py", [], "ladies-distinct, parts: epoch"),
    ("placement.py", ["--links"], "clustered, 2 x 4: placement, bias to own and fast over placement"),
    ("labor.py", ["--plot"], "input nodes, LADIES less than LABOR-*"),
    (
        "dependent.py",
        ["work", "--plot"],
        "R-MAT, RandomWalk, edges: input nodes per seed, 64 seeds over 16",
    ),
    ("dependent.py", ["misses"], "clustered: misses of LRU caches"),
    ("dependent.py", ["learning"], "Neighbor, kappa inf: accuracy"),
    ("dependent.py", ["locality", "--plot"], "locality 16, with weights: accuracy"),
    ("packs.py", ["--plot"], "rows that differ from the table: 0 of "),
    ("pack_epochs.py", ["--reads", "pack", "--hidden", "4"], "| 16 | 16 | 0 |"),
    ("pack_versions.py", ["--datasets", "BIG"], "BIG, default, 32 MB: later epochs"),
]
"""The first one runs by default, the others are slow."""


@pytest.mark.parametrize(
    ("name", "args", "said"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_benchmark_runs(name, args, said, tmp_path, run, monkeypatch, request):
    """rows.py, packs.py, pack_versions.py and `loading.py cold` start fresh processes."""
    if "cold" in args:
        request.getfixturevalue("on_disk")
    if name == "epoch.py" or args[:1] in (["pyg"], ["memory"]):
        train_here(monkeypatch)
    where = [] if name in IN_MEMORY else ["--dir", str(tmp_path)]
    result, plot = tmp_path / "result.json", tmp_path / "plot.png"
    args = [word for arg in args for word in ([arg, str(plot)] if arg == "--plot" else [arg])]
    assert said in run(name, *args, "--small", "--json", str(result), *where)
    written = json.loads(result.read_text())
    assert written["command"].startswith(f"bench/{name}")
    assert written["figures"] or written["tables"]
    if "--plot" in args:
        assert plot.read_bytes().startswith(b"\x89PNG")
        plot.unlink()
    assert [path.name for path in tmp_path.iterdir()] == [result.name]


def test_another_law_of_draws_is_noticed(monkeypatch):
    """By matrix_sampling.py, which compares the draws of gids with those of matrices."""
    monkeypatch.syspath_prepend(BENCH)
    import matrix_sampling
    from harness import Figures

    args = Namespace(json=None, small=True, draws=1000, seed=0, fanouts=[], sizes=[])
    by_degree = {"count": matrix_sampling.OUR_LADIES["degree"]}
    monkeypatch.setattr(matrix_sampling, "OUR_LADIES", by_degree)
    assert not matrix_sampling.compare_draws(args, Figures(args))
