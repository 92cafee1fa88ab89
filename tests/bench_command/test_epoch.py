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
from gids.bench.epoch import check_task
from gids.bench.features import KeptRows, map_array
from gids.bench.isolation import FreshProcessError
from gids.bench.sides import FRAMEWORKS, OURS, PLAIN, EpochConfig, installed_framework
from gids.cli import arguments
from gids.loader.options import Reads
from gids.store import FeatureStore, Table
from gids.write import DatasetWriter

SMALL = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 3)
STOCK = {
    "dgl": "DGL's DataLoader over a memory-mapped tensor in g.ndata",
    "pyg": "PyG's N",
    "torch": "x[input_nodes] of a memory-mapped tensor",
}


def skip_without(framework):
    if importlib.util.find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_sides_train_and_are_compared(dataset, bench, monkeypatch, framework):
    skip_without(framework)
    train_here(monkeypatch)
    said, report = bench("epoch", dataset, *SMALL, "--with", framework)
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock, MADV_RANDOM", "stock"]
    assert [f["metrics"]["batches"] for f in report["figures"]] == [3, 3, 3]
    rows = [f["metrics"]["rows"] for f in report["figures"]]
    assert min(rows) > 0.9 * max(rows)  # DGL's threads draw different neighbors of the same seeds
    assert "x as many rows per second as stock" in said
    assert "memory was NOT limited (this process is not limited" in said
    assert report["subject"]["with"] == framework
    assert f"note: stock is {STOCK[framework]}" in said


@pytest.fixture
def pyg_side():
    return pytest.importorskip("gids.bench.pyg_side", exc_type=ImportError)


def test_the_sampler_of_gids_draws_the_same_minibatches_for_pyg(dataset, pyg_side):
    side = pyg_side.PygSide(EpochConfig(OURS, str(dataset), ("_N.feat",), (3, 2), 8, 0, 3))
    native = pyg_side.NativeSampler(side.store, [2, 3], 8, 0, 0)
    data = pyg_side.Data(num_nodes=3000, edge_index=torch.empty(2, 0, dtype=torch.int64))
    stock = pyg_side.NodeLoader(data, native, input_nodes=side.train_ids, batch_size=8)
    with gids.open(dataset, memory="96MB") as source:
        for ours, theirs in zip(side.gids_loader(source), stock, strict=True):
            assert torch.equal(ours.n_id, theirs.n_id)
            assert torch.equal(ours.edge_index, theirs.edge_index)


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
def test_stock_is_the_neighbor_loader_of_pyg_if_that_can_sample(dataset, pyg_side, monkeypatch):
    def in_edges(colptr, row, seed, counts, replace, directed):
        assert counts == [2, 3]  # PyG begins with the seeds
        edges = torch.cat([torch.arange(colptr[v], colptr[v + 1]) for v in seed])
        nodes = torch.cat([seed, row[edges]])
        targets = torch.arange(len(seed)).repeat_interleave(colptr[seed + 1] - colptr[seed])
        return nodes, len(seed) + torch.arange(len(edges)), targets, edges

    monkeypatch.setattr("torch_geometric.typing.WITH_PYG_LIB", False)
    monkeypatch.setattr("torch_geometric.typing.WITH_TORCH_SPARSE", True)
    monkeypatch.setattr(torch.ops, "torch_sparse", SimpleNamespace(neighbor_sample=in_edges), raising=False)
    monkeypatch.setattr(pyg_side, "SAMPLED_BY", "torch-sparse")
    side = pyg_side.PygSide(EpochConfig(PLAIN, str(dataset), ("_N.feat",), (3, 2), 8, 0, 1))
    features = map_array(side.tables[0], random_access=False)
    [minibatch] = side.stock_loader([features])
    graph = side.store.graph()
    seeds = side.train_ids.tolist()
    expected = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]] for v in seeds]
    sources, targets = minibatch.n_id[minibatch.edge_index]
    assert sources.tolist() == np.concatenate(expected).tolist()
    assert targets.tolist() == [v for v, ids in zip(seeds, expected, strict=True) for _ in ids]
    assert torch.equal(minibatch.x, features[minibatch.n_id])
    assert torch.equal(side.labels(minibatch), side.store.labels["_N"][side.train_ids].long())


def test_the_first_framework_that_is_installed_is_compared(monkeypatch):
    assert tuple(FRAMEWORKS) == arguments.FRAMEWORKS
    for missing, first in ((), "dgl"), (["dgl"], "pyg"), (["dgl", "torch_geometric"], "torch"):
        monkeypatch.setattr("gids.bench.sides.find_spec", lambda name, m=missing: name not in m)
        assert installed_framework() == first


def test_a_heterogeneous_dataset_is_refused(tmp_path, bench):
    with DatasetWriter(tmp_path / "typed.gids") as writer:
        writer.write_table("node", "paper", "feat", torch.randn(60, 8))
        writer.write_graph(("author", "writes", "paper"), np.arange(61), np.arange(60), num_src=60)
    said, _ = bench("epoch", tmp_path / "typed.gids", *SMALL, status=2)
    assert "typed.gids has 2 node types and 1 relations" in said
    assert "trains on one of each: measure it with `gids bench bandwidth`" in " ".join(said.split())


@pytest.mark.slow
def test_sides_train_in_processes_of_their_own(dataset, bench):
    _, report = bench("epoch", dataset, *SMALL, "--seconds", 60)
    metrics = {f["setting"]["side"]: f["metrics"] for f in report["figures"]}
    assert list(metrics) == ["gids", "stock, MADV_RANDOM", "stock"]
    assert metrics["gids"]["batches"] == 3
    assert metrics["gids"]["read_bytes"] < 100e6


@pytest.mark.slow
def test_reads_by_packs_are_described(dataset, bench, tmp_path, monkeypatch):
    train_here(monkeypatch)
    scratch = ("--scratch", tmp_path, "--scratch", dataset.parent)
    said, report = bench("epoch", dataset, *SMALL, "--reads", "pack", *scratch)
    metrics = report["figures"][0]["metrics"]
    assert metrics["written_bytes"] > 0  # packs and sampled minibatches, or these alone
    assert "hit_ratio" not in metrics
    assert "note: gids read 3 minibatches by pack reads, took " in said


def test_reads_has_the_values_of_gids_open():
    assert get_args(Reads) == arguments.READS


def write(path, *, dim=1024, labels=True, train=40, stripe=1, key="feat", **options):
    with DatasetWriter(path, stripe=stripe) as writer:
        writer.write_table("node", "_N", key, torch.randn(60, dim), **options)
        writer.write_graph(("_N", "_E", "_N"), np.arange(61), np.arange(60), num_src=60)
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


def test_matrices_are_refused(tmp_path):
    with DatasetWriter(tmp_path / "x.gids") as writer:
        for key, shape in (("image", (4, 4)), ("text", (8,))):
            writer.write_table("node", "_N", key, torch.randn(60, *shape))
        writer.write_graph(("_N", "_E", "_N"), np.arange(61), np.arange(60), num_src=60)
    store = FeatureStore(tmp_path / "x.gids")
    with pytest.raises(ValueError, match=r"'_N.image' .*: choose another --table"):
        check_task(store, store.table("_N.image"))


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


def test_gids_that_fails_is_an_error_with_its_cause(dataset, bench, monkeypatch):
    make_up(monkeypatch, gids=FreshProcessError("long story\nMemoryBudgetError: too small", "failed"))
    said, report = bench("epoch", dataset, *SMALL, status=2)
    assert "MemoryBudgetError: too small" in said
    assert not report


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


@pytest.mark.parametrize("options", [{"labels": False}, {"train": 0}])
def test_missing_parts_of_the_dataset_are_named(tmp_path, bench, options):
    text, _ = bench("epoch", write(tmp_path / "x.gids", **options), *SMALL, status=2)
    assert "x.gids has no train split of nodes whose labels are classes" in text


def test_a_train_node_without_a_class_is_refused(tmp_path, bench):
    text, _ = bench("epoch", write(tmp_path / "x.gids", train=55), *SMALL, status=2)
    assert "nodes in the train split without a class: remove them" in text


@pytest.mark.parametrize("batches", [3, 1000])
def test_kept_rows_are_compared_bit_for_bit_in_bounded_memory(batches, monkeypatch):
    monkeypatch.setattr("gids.bench.features._KEPT_BYTES", 40_000)  # 2000 rows of 20 B
    rows = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    rows[3, 2], rows[4, 2] = float("nan"), 0.0
    kept = KeptRows(batches, cast(Table, SimpleNamespace(shape=(5,), dtype=torch.float32, scale=None)))
    for _ in range(batches):
        read = rows[:64].clone()
        read[4, 2] = -0.0
        read[9, 0] += 1
        kept.add(torch.arange(64), read)
    compared, wrong = kept.compare(lambda ids: rows[ids])
    assert compared == 64 * min(batches, 32)
    assert wrong == 2 * min(batches, 32)
