"""bench/scale.py predicts what ranks count, within 5 %; its tables, JSON and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import in_edges

import gids.distributed
from gids.bench.sampling import make_sampler
from gids.store import FeatureStore
from gids.write import DatasetWriter
from gids.write.partition import partition

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import scale
from curves import Setting, measure

NODES, SEEDS, BATCH = 24_000, 2048, 32
FANOUTS = (4, 3)
NEAR = 0.05
QUICK = ["--fanouts", "3,2", "--batch-size", "128", "--storage-gb-s", "2", "--reads-per-s", "1e5"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Some nodes are the source of many edges."""
    path = tmp_path_factory.mktemp("scale") / "one.gids"
    rng = np.random.default_rng(1)
    indptr, indices = in_edges(rng.integers(0, 16, NODES), NODES, 2)
    indices = (NODES * rng.random(len(indices)) ** 2).astype(indices.dtype)
    with DatasetWriter(path, page_bytes=512) as writer:
        rows = torch.arange(NODES * 32, dtype=torch.float32).view(NODES, 32)
        writer.write_table("node", "paper", "feat", rows)
        writer.write_graph(("paper", "cites", "paper"), indptr, indices, num_src=NODES)
        writer.write_split("paper", "train", torch.arange(0, 9 * SEEDS, 9))
    return path


def count_epoch(path: Path, mode: str) -> dict[str, float]:
    """What this rank works on, reads and gets in a step of an epoch, on average."""
    rank, size = dist.get_rank(), dist.get_world_size()
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "seed": 0}
    if mode == "independent":
        source = gids.open(path, memory="64MB")
        options |= {"rank": rank, "world_size": size}
    else:
        source = gids.distributed.open(path, memory="64MB")
        options["cooperative"] = mode == "cooperative"
    sampler = make_sampler("neighbor", FANOUTS, BATCH, threads=1)
    counts = dict.fromkeys(("nodes", "edges", "input", "received", "received inputs"), 0.0)
    with source, gids.NodeLoader(source, source.split("train"), sampler, **options) as loader:
        for minibatch in loader:
            counts["nodes"] += sum(b.num_dst for b in minibatch.blocks) + len(minibatch.input_nodes)
            counts["edges"] += sum(b.num_edges for b in minibatch.blocks)
            counts["input"] += len(minibatch.input_nodes)
            for layer, plans in enumerate(getattr(minibatch, "exchanges", [])):
                came = sum(sum(p.expected) - p.expected[rank] for p in plans)
                counts["received"] += came
                counts["received inputs"] += came if layer == 0 else 0
        stats = loader.stats()
        counts |= {"pages": stats["pages"], **stats.get("group", {})}
        return {name: value / len(loader) for name, value in counts.items()}


def test_counts_of_processes(dataset, ranks):
    size = 4
    setting = Setting(FANOUTS, BATCH, "neighbor", seconds=600, threads=1)
    curves = measure(FeatureStore(dataset), setting, size * BATCH)
    for mode, of_prediction in (
        ("independent", {"nodes": "nodes", "edges": "edges", "input": "rows", "pages": "pages"}),
        ("partitioned", {"rows asked": "rows_received", "rows sent": "rows_received", "pages": "pages"}),
        (
            "cooperative",
            {"nodes": "nodes", "edges": "edges", "input": "rows", "pages": "pages"}
            | {"received": "ids_received", "received inputs": "rows_received"},
        ),
    ):
        told = ranks.run(size, count_epoch, dataset, mode)
        predicted = scale.step_work(curves, scale.Plan(cache_bytes=0), scale.Model(), mode, size)
        for name, field in of_prediction.items():
            counted = float(np.mean([of_rank[name] for of_rank in told]))
            assert getattr(predicted, field) == pytest.approx(counted, rel=NEAR), (mode, name)


@pytest.fixture
def run(capsys):
    def run(*arguments, status=0):
        ended = 0
        try:
            scale.main([*map(str, arguments)])
        except SystemExit as end:
            ended = end.code
        said = capsys.readouterr()
        assert ended == status, said.err
        return said.err if status else said.out

    return run


def test_tables_and_json_agree(dataset, run, tmp_path):
    pytest.importorskip("matplotlib")
    plot, out = tmp_path / "x.png", tmp_path / "out.json"
    said = run(dataset, *QUICK, "--ranks", "16", "--seconds", "0.3", "--json", out, "--plot", plot)
    found = json.loads(out.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[0] == "one.gids: 2,048 seeds, batch 128 per rank, neighbor"
    assert said.splitlines()[-1] == found["recommendation"]
    modes = {(p["ranks"], p["mode"]): p for p in found["predictions"]}
    assert (4, "1.5D") in modes
    assert (2, "1.5D") not in modes
    for ranks in (1, 2, 4, 8, 16):
        alone, together = modes[ranks, "independent"], modes[ranks, "cooperative"]
        assert alone["steps"] == together["steps"] == 16 // ranks
        assert together["storage_bytes"] <= alone["storage_bytes"]
        slowest = max(alone["parts_s"].values())
        assert alone["parts_s"][alone["bottleneck"]] == slowest
        assert alone["seconds"] == pytest.approx(2048 / (128 * ranks) * slowest)
    assert modes[1, "cooperative"]["network_bytes"] == 0
    assert modes[1, "cooperative"]["seconds"] == modes[1, "independent"]["seconds"]


def test_sizes_that_are_not_measured_are_extrapolated_and_memory_limits_the_advice(dataset, run):
    said = run(dataset, *QUICK, "--ranks", "16", "--seconds", "1e-9", "--memory", "1kB")
    assert "~: extrapolated from minibatches of at most 256 seeds" in said
    assert said.splitlines()[-1].startswith("No mode fits: the smallest, ")


def test_what_cannot_be_measured_is_refused(dataset, tmp_path, run):
    assert "--cache 5x is not a cache size" in run(dataset, *QUICK, "--cache", "5x", status=2)
    assert "in a val split" in run(dataset, *QUICK, "--seeds", "val", status=2)
    with DatasetWriter(tmp_path / "edges.gids") as writer:
        writer.write_graph(("_N", "_E", "_N"), np.arange(41), np.arange(40), num_src=40)
    assert "edges.gids has no table of nodes" in run(tmp_path / "edges.gids", *QUICK, status=2)
    partition(dataset, tmp_path / "parts", 2)
    part = tmp_path / "parts/part-000.gids"
    assert "measure with the whole dataset" in run(part, *QUICK, status=2)
