"""bench/scale.py predicts what ranks count, within 5 %; its tables, JSON and errors."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import gids
from datasets import in_edges
from programs import count_epoch

from gids.bench.sampling import make_sampler
from gids.store import FeatureStore
from gids.write import DatasetWriter

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import scale
from curves import Setting, measure

NODES, SEEDS, BATCH = 24_000, 2048, 32
FANOUTS = (4, 3)
NEAR = 0.05
RATES = ["--storage-gb-s", "2", "--reads-per-s", "1e5"]
QUICK = ["--fanouts", "3,2", "--batch-size", "128", *RATES]


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


def compare(predicted, counted):
    far = {name: abs(p - counted[name]) > NEAR * counted[name] for name, p in predicted.items()}
    wrong = {name: (predicted[name], counted[name]) for name in far if far[name]}
    assert not wrong


@pytest.mark.few(1)
@pytest.mark.parametrize("sampler", ["neighbor", "labor"])
@pytest.mark.parametrize("size", [4, 1])
def test_counts_of_processes(dataset, ranks, size, sampler):
    store = FeatureStore(dataset)
    setting = Setting(FANOUTS, BATCH, sampler, seconds=600, threads=1)
    curves = measure(store, setting, size * BATCH)
    arguments = store.split("train"), make_sampler(sampler, FANOUTS, BATCH, threads=1), BATCH

    def count(mode):
        told = ranks.run(size, count_epoch, dataset, *arguments, mode)
        return {name: float(np.mean([of_rank[name] for of_rank in told])) for name in told[0]}

    def predict(mode):
        return scale.step_work(curves, scale.Plan(cache_bytes=0), scale.Model(), mode, size)

    alone, divided, together = map(predict, ("independent", "partitioned", "cooperative"))
    compare(
        {
            "seeds": BATCH,
            "nodes": alone.nodes,
            "edges": alone.edges,
            "input": alone.rows,
            "pages": alone.pages,
        },
        count("independent"),
    )
    compare(
        {"rows asked": divided.rows_received, "rows sent": divided.rows_received, "pages": divided.pages},
        count("partitioned"),
    )
    compare(
        {
            "nodes": together.nodes,
            "edges": together.edges,
            "input": together.rows,
            "pages": together.pages,
            "received": together.ids_received,
            "received inputs": together.rows_received,
        },
        count("cooperative"),
    )


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
    said = run(dataset, *QUICK, "--ranks", "16", "--json", out, "--plot", plot)
    found = json.loads(out.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[0] == "one.gids: 2,048 seeds, batch 128 per rank, neighbor"
    assert said.splitlines()[-1] == found["recommendation"]
    assert [p["batch_size"] for p in found["curves"]] == [128, 256, 512, 1024, 2048]
    modes = {(p["ranks"], p["mode"]): p for p in found["predictions"]}
    assert {ranks for ranks, _ in modes} == {1, 2, 4, 8, 16}
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
    # What earlier versions predict of this dataset
    assert modes[4, "independent"]["work"]["rows"] == 1112.625
    assert modes[4, "cooperative"]["work"]["rows_received"] == pytest.approx(644.899, rel=1e-5)


def test_sizes_that_are_not_measured_are_extrapolated_and_memory_limits_the_advice(dataset, run):
    said = run(dataset, *QUICK, "--ranks", "16", "--seconds", "1e-9", "--memory", "1kB")
    assert "~: extrapolated from minibatches of at most 256 seeds" in said
    assert said.splitlines()[-1].startswith("No mode fits: the smallest, ")


def test_caches_miss_less_the_larger_they_are_and_dependent_minibatches_miss_less(dataset):
    store, missed = FeatureStore(dataset), {}
    whole = store.table("paper.feat").page_count * 512
    for policy, kappa in (("static", 1), ("lru", 1), ("lru", 64)):
        setting = Setting(FANOUTS, 64, "labor", kappa, policy=policy, seconds=600, threads=1)
        found = measure(store, setting, 64)
        plans = [scale.Plan(cache_bytes=share * whole) for share in (0, 0.05, 0.2, 0.5, 1)]
        pages = [scale.step_work(found, plan, scale.Model(), "independent", 1).pages for plan in plans]
        assert all(a >= b for a, b in pairwise(pages))
        assert pages[0] == pytest.approx(found.points[-1].pages["paper.feat"], rel=0.03)
        missed[policy, kappa] = pages
    assert missed["static", 1][-1] == 0
    assert missed["static", 1][2] < missed["static", 1][0]
    assert missed["lru", 64][3] < 0.9 * missed["lru", 1][3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache", "5x"], "--cache 5x is not a cache size: use 2% (of the pages) or 4GB"),
        (["--seeds", "val"], "no node of one.gids is in a val split"),
        (["--sampler", "graph"], "argument --sampler: "),
    ],
)
def test_errors(dataset, run, options, said):
    assert said in run(dataset, *QUICK, *options, status=2)


def test_a_dataset_that_cannot_be_measured_is_refused(dataset, tmp_path, run):
    with DatasetWriter(tmp_path / "edges.gids") as writer:
        writer.write_graph(("_N", "_E", "_N"), np.arange(41), np.arange(40), num_src=40)
    assert "edges.gids has no table of nodes" in run(tmp_path / "edges.gids", *QUICK, status=2)
    gids("partition", dataset, tmp_path / "parts", "--parts", "2", "--quiet")
    part = next(p for p in (tmp_path / "parts").iterdir() if p.is_dir())
    assert "measure with the whole dataset" in run(part, *QUICK, status=2)
