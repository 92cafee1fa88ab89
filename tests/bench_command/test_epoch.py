"""`gids bench epoch`: both sides train on a dataset; a dataset that it cannot train on is refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import cast, get_args

import numpy as np
import pytest
import torch
from epoch_results import make_up, train_here

import gids
from gids.bench.features import KeptRows
from gids.bench.isolation import FreshProcessError
from gids.bench.sides import FRAMEWORKS, OURS, EpochConfig, installed_framework
from gids.cli import arguments
from gids.loader.options import Reads
from gids.store import Table
from gids.write import DatasetWriter

SMALL = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 3)
STOCK = {
    "dgl": "DGL's DataLoader over a memory-mapped tensor in g.ndata",
    "pyg": "PyG's N",
    "torch": "x[input_nodes] of a memory-mapped tensor",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_sides_train_and_are_compared(dataset, bench, monkeypatch, plot, framework):
    if importlib.util.find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    train_here(monkeypatch)
    said, report = bench("epoch", dataset, *SMALL, "--with", framework, *plot)
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock, MADV_RANDOM", "stock"]
    assert [f["metrics"]["batches"] for f in report["figures"]] == [3, 3, 3]
    rows = [f["metrics"]["rows"] for f in report["figures"]]
    assert min(rows) > 0.9 * max(rows)  # DGL's threads draw different neighbors of the same seeds
    assert "x as many rows per second as stock" in said
    assert "memory was NOT limited (this process is not limited" in said
    assert report["subject"]["with"] == framework
    assert f"note: stock is {STOCK[framework]}" in said


def test_the_sampler_of_gids_draws_the_same_minibatches_for_pyg(dataset):
    pyg_side = pytest.importorskip("gids.bench.pyg_side", exc_type=ImportError)
    side = pyg_side.PygSide(EpochConfig(OURS, str(dataset), ("_N.feat",), (3, 2), 8, 0, 3))
    native = pyg_side.NativeSampler(side.store, [2, 3], 8, 0, 0)
    data = pyg_side.Data(num_nodes=3000, edge_index=torch.empty(2, 0, dtype=torch.int64))
    stock = pyg_side.NodeLoader(data, native, input_nodes=side.train_ids, batch_size=8)
    with gids.open(dataset, memory="96MB") as source:
        for ours, theirs in zip(side.gids_loader(source), stock, strict=True):
            assert torch.equal(ours.n_id, theirs.n_id)
            assert torch.equal(ours.edge_index, theirs.edge_index)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without:UserWarning")
def test_the_sampler_of_pyg_gets_the_same_edges_and_fanouts(dataset, monkeypatch):
    """It does not sample here: that needs pyg-lib or torch-sparse."""
    pyg_side = pytest.importorskip("gids.bench.pyg_side", exc_type=ImportError)
    monkeypatch.setattr(pyg_side, "SAMPLED_BY", "pyg-lib")
    side = pyg_side.PygSide(EpochConfig(OURS, str(dataset), ("_N.feat",), (3, 2), 8, 0, 3))
    sampler = side.stock_loader([torch.zeros(3000, 1)]).node_sampler
    assert sampler.num_neighbors.get_mapped_values() == [2, 3]
    graph = side.store.graph()
    assert np.array_equal(sampler.colptr, graph.indptr)
    assert np.array_equal(sampler.row, graph.indices)


def test_the_command_line_repeats_what_it_must_not_import():
    assert tuple(FRAMEWORKS) == arguments.FRAMEWORKS
    assert get_args(Reads) == arguments.READS


def test_the_first_framework_that_is_installed_is_compared(monkeypatch):
    for missing, first in ((), "dgl"), (["dgl"], "pyg"), (["dgl", "torch_geometric"], "torch"):
        monkeypatch.setattr("gids.bench.sides.find_spec", lambda name, m=missing: name not in m)
        assert installed_framework() == first


@pytest.mark.slow
def test_sides_train_in_processes_of_their_own(dataset, bench):
    _, report = bench("epoch", dataset, *SMALL, "--seconds", 60, "--with", "torch")
    metrics = {f["setting"]["side"]: f["metrics"] for f in report["figures"]}
    assert list(metrics) == ["gids", "stock, MADV_RANDOM", "stock"]
    assert metrics["gids"]["batches"] == 3
    assert metrics["gids"]["read_bytes"] < 100e6


def write(path, *, dim=1024, labels=True, train=40, stripe=1, shape=None, sources="_N", **options):
    with DatasetWriter(path, stripe=stripe) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(60, *(shape or (dim,))), **options)
        writer.write_graph((sources, "_E", "_N"), np.arange(61), np.arange(60), num_src=60)
        if labels:
            nodes = torch.arange(60)
            writer.write_labels("_N", torch.where(nodes < 50, nodes % 4, -1))  # -1: no label
        writer.write_split("_N", "train", torch.arange(train))
        writer.write_split("_N", "val", torch.arange(40, 50))
    return path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stripe": 2}, "spread over 2 shards"),
        ({"dim": 100}, "rows of 400 B leave a part of each page"),
        ({"dtype": torch.int8, "scale": "row"}, "its rows are int8 with a scale"),
        ({"dtype": torch.bfloat16}, "NumPy has no bfloat16"),
    ],
)
def test_only_gids_runs_if_stock_cannot_map_the_table(tmp_path, bench, monkeypatch, options, reason):
    make_up(monkeypatch)
    said, report = bench("epoch", write(tmp_path / "x.gids", **options), *SMALL)
    assert "only gids is measured" in said
    assert reason in " ".join(said.split())
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids"]


@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ({"sources": "author"}, [], "2 node types and 1 relations; `gids bench epoch` trains on one of each"),
        ({"shape": (4, 4)}, [], "has node rows of shape [4, 4], and training needs a vector per node"),
        ({"labels": False}, [], "x.gids has no train split of nodes whose labels are classes"),
        ({"train": 0}, [], "x.gids has no train split of nodes whose labels are classes"),
        ({"train": 55}, [], "nodes in the train split without a class: remove them"),
        ({}, ["--memory-limit", "1MB"], "--memory-limit 1.0 MB is too small for the minibatches in flight"),
    ],
)
def test_what_it_cannot_train_on_is_refused(tmp_path, bench, options, arguments, reason):
    said, report = bench("epoch", write(tmp_path / "x.gids", **options), *SMALL, *arguments, status=2)
    assert reason in " ".join(said.split())
    assert not report


def test_stock_gets_the_memory_that_gids_took_and_may_be_killed(dataset, bench, monkeypatch):
    reason = "needed more memory than its limit and was killed by the kernel"
    taken = {"base_rss_bytes": 100 << 20, "peak_rss_bytes": 300 << 20}
    configs = make_up(monkeypatch, gids=taken, stock_advised=FreshProcessError("killed", reason))
    said, report = bench("epoch", dataset, *SMALL)
    assert f"`stock, MADV_RANDOM` {reason}" in " ".join(said.split())
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock"]
    assert report["answers"] == ["gids loads 1.0 x as many rows per second as stock"]
    assert [(c["side"], c["most_seconds"], c["memory_bytes"] >> 20) for c in configs] == [
        ("gids", 0, 96),
        ("stock, MADV_RANDOM", 60, 264),
        ("stock", 15, 264),
    ]


def test_a_side_that_is_stopped_is_compared_by_rows_or_not_at_all(dataset, bench, monkeypatch):
    configs = make_up(
        monkeypatch,
        gids={"batches": 20, "rows": 2000},
        stock_advised={"batches": 2, "rows": 200, "cached_before": 0.5},
        stock={"batches": 1, "rows": 100},
    )
    options = ("--fanouts", "3,3", "--batch-size", 1, "--batches", 20, "--seconds", 30)
    said, report = bench("epoch", dataset, *options)
    assert report["answers"] == ["gids loads 10.0 x as many rows per second as stock, MADV_RANDOM"]
    assert "`stock, MADV_RANDOM` was stopped after 2 of 20 minibatches in 2.00 s: compare rows/s" in said
    assert "`stock` was stopped after 1 of 20 minibatches in 2.00 s: too few for a ratio" in said
    assert "results of stock, MADV_RANDOM are WARM: 50% of a file" in said
    assert [config["most_seconds"] for config in configs] == [5, 5, 5]


def test_different_rows_are_an_error(dataset, bench, monkeypatch):
    make_up(monkeypatch, gids={"wrong_rows": 1})
    said, _ = bench("epoch", dataset, *SMALL, status=2)
    assert "1 of 32 rows from gids differ" in said


@pytest.mark.parametrize(("batches", "kept"), [(3, 3), (300, 100)])
def test_kept_rows_are_compared_bit_for_bit_in_bounded_memory(batches, kept):
    """Of 4 KiB: those of 128 minibatches are 32 MiB."""
    rows = torch.randn(100, 1024)
    rows[3, 2], rows[4, 2] = float("nan"), 0.0
    read = rows[:64].clone()
    read[4, 2] = -0.0
    read[9, 0] += 1
    table = cast(Table, SimpleNamespace(shape=(1024,), dtype=torch.float32, scale=None))
    keeper = KeptRows(batches, table)
    for _ in range(batches):
        keeper.add(torch.arange(64), read)
    assert keeper.compare(lambda ids: rows[ids]) == (64 * kept, 2 * kept)
