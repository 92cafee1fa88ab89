"""`gids bench epoch`: both sides train on a dataset; a dataset that it cannot train on is refused."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import cast, get_args

import numpy as np
import pytest
import torch
from commands import gids
from epoch_results import epoch_result, train_here

from gids.bench import epoch
from gids.bench.epoch import choose_task
from gids.cli import arguments
from gids.convert.synthetic import GraphSpec, write_graph
from gids.loader import source
from gids.loader.options import Reads
from gids.measure.features import map_array, why_no_array
from gids.measure.isolation import FreshProcessOutOfMemory
from gids.store import FeatureStore, Table
from gids.write import DatasetWriter

SMALL = ("--batch-size", 8, "--fanouts", "3,3", "--batches", 3)


@pytest.mark.slow
def test_reads_by_packs_are_described(dataset, bench, tmp_path, monkeypatch):
    train_here(monkeypatch)
    scratch = ("--scratch", tmp_path, "--scratch", dataset.parent)
    options = ("--sides", "gids", "--reads", "pack", *scratch)
    said, report = bench("epoch", dataset, *SMALL, *options)
    assert report["subject"]["reads"] == "pack"
    metrics = {name: spread["median"] for name, spread in report["figures"][0]["metrics"].items()}
    assert metrics["batches"] == 3
    assert metrics["written_bytes"] > 0  # packs and sampled minibatches, or these alone
    assert "hit_ratio" not in metrics
    assert "note: gids read 3 minibatches by pack reads in " in said
    assert "(predicted: pack " in said


def test_without_direct_io_gids_reads_through_the_page_cache(dataset, bench, monkeypatch):
    train_here(monkeypatch)
    opened, open_source = [], source.open

    def refused(path, *, direct):
        if direct:
            raise OSError(errno.EINVAL, "the file system refuses direct I/O")
        return "squashfs", 1

    def recorded(*arguments, **options):
        opened.append(options["tuning"].direct)
        return open_source(*arguments, **options)

    monkeypatch.setattr("gids._core.probe_file", refused)
    monkeypatch.setattr("gids.measure.epoch.gids.open", recorded)
    said, _ = bench("epoch", dataset, *SMALL, "--sides", "gids")
    assert set(opened) == {False}
    assert "note: the file system has no direct I/O: gids reads through the page cache, too" in said


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
    path = write(tmp_path / "x.gids", **options)
    assert reason in why_no_array(FeatureStore(path).table("feat"))
    monkeypatch.setattr("gids.measure.sides.run_side", lambda config, **_: epoch_result(config.side))
    said, report = bench("epoch", path, *SMALL)
    assert "only gids is measured" in said
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids"]
    said, _ = bench("epoch", path, *SMALL, "--sides", "stock", status=2)
    assert "stock DGL cannot map table '_N.feat'" in said


@pytest.mark.slow
def test_both_sides_train_on_float16_and_are_warm_if_the_page_cache_is_kept(tmp_path, bench, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    train_here(monkeypatch)
    monkeypatch.setattr("gids.measure.sides.drop_page_cache", refuse)
    path = write(tmp_path / "x.gids", dtype=torch.float16, key="embedding")
    FeatureStore(path).table("embedding").shard_paths[0].read_bytes()
    said, report = bench("epoch", path, *SMALL, "--sides", "gids,stock-random")
    assert [f["metrics"]["batches"]["median"] for f in report["figures"]] == [3, 3]
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock, MADV_RANDOM"]
    assert "results of stock, MADV_RANDOM are WARM" in said


@pytest.mark.slow
def test_int8_in_shards_on_other_disks_is_compared_with_the_table(tmp_path, bench, monkeypatch):
    train_here(monkeypatch)
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    path = write(tmp_path / "x.gids", dim=100, dtype=torch.int8, scale="row", stripe=disks)
    said, report = bench("epoch", path, *SMALL, "--allow-dir", disks[0], "--allow-dir", disks[1])
    assert "only gids is measured" in said
    assert report["figures"][0]["metrics"]["batches"]["median"] == 3


def test_stock_maps_a_table_larger_than_memory(tmp_path):
    shard = tmp_path / "shard"
    with shard.open("wb") as file:
        file.truncate(1 << 40)
    table = SimpleNamespace(shard_paths=[shard], dtype=torch.float32, row_count=1 << 30, shape=(256,))
    rows = map_array(cast(Table, table), random_access=True)
    assert rows.shape == (1 << 30, 256)
    assert not rows[-1].any()


def test_edge_features_are_refused(dataset):
    with DatasetWriter(dataset.parent / "edges.gids") as writer:
        writer.write_table("edge", ("_N", "_E", "_N"), "feat", torch.randn(60, 8))
        writer.write_graph(("_N", "_E", "_N"), np.arange(61), np.arange(60), num_src=60)
        writer.write_labels("_N", torch.arange(60) % 4)
        writer.write_split("_N", "train", torch.arange(40))
    store = FeatureStore(dataset.parent / "edges.gids")
    with pytest.raises(
        ValueError, match=r"has edge rows of shape \[8\], .*: convert features of nodes as vectors"
    ):
        choose_task(store, store.table("feat"))


def test_matrices_are_refused_and_the_error_names_the_vectors_of_their_type(tmp_path):
    with DatasetWriter(tmp_path / "x.gids") as writer:
        for ntype, key, shape in (
            ("paper", "image", (4, 4)),
            ("paper", "text", (8,)),
            ("author", "image", (4, 4)),
            ("author", "words", (8,)),
        ):
            writer.write_table("node", ntype, key, torch.randn(60, *shape))
        writer.write_graph(("author", "writes", "paper"), np.arange(61), np.arange(60), num_src=60)
        writer.write_labels("paper", torch.arange(60) % 4)
        writer.write_split("paper", "train", torch.arange(40))
    store = FeatureStore(tmp_path / "x.gids")
    with pytest.raises(ValueError, match=r"'paper.image' .*: choose another table by --table \(paper.text\)"):
        choose_task(store, store.table("paper.image"))
    task = choose_task(store, store.table("paper.text"))
    assert sorted(table.name for table in task.tables) == ["author.words", "paper.text"]


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Papers with classes and a train split, and authors; rows of 4 KiB."""
    directory = tmp_path_factory.mktemp("typed")
    spec = GraphSpec(node_count=300, degree=6, dim=1024, train_count=60)
    write_graph(directory / "source", spec, typed=True)
    gids("convert", directory / "source", directory / "typed.gids", "--quiet")
    return directory / "typed.gids"


def test_a_heterogeneous_dataset_trains_on_the_type_with_classes(typed):
    store = FeatureStore(typed)
    task = choose_task(store, store.table("author.feat"))
    assert task.target == "paper"
    assert sorted(table.name for table in task.tables) == ["author.feat", "paper.feat"]


@pytest.mark.slow
def test_all_sides_train_on_a_heterogeneous_dataset(typed, bench, monkeypatch):
    train_here(monkeypatch)
    _, report = bench("epoch", typed, *SMALL)
    assert report["subject"]["target"] == "paper"
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock, MADV_RANDOM", "stock"]
    assert [f["metrics"]["batches"]["median"] for f in report["figures"]] == [3, 3, 3]
    rows = [f["metrics"]["rows"]["median"] for f in report["figures"]]
    assert min(rows) > 0.9 * max(rows)  # DGL's threads draw different neighbors of the same seeds


def test_a_note_says_that_memory_is_not_limited(dataset, bench, monkeypatch):
    monkeypatch.setattr("gids.measure.sides.why_no_limit", lambda: "no memory control group: no")
    limits = []

    def run(config, *, limited, **_):
        limits.append(limited)
        return epoch_result(config.side, batches=2)

    monkeypatch.setattr("gids.measure.sides.run_side", run)
    said, _ = bench("epoch", dataset, *SMALL, "--repeat", 2)
    assert "gids loads 1.0 x as many rows per second as stock" in said
    assert limits == [False] * 6
    assert "memory was NOT limited (no memory control group: no" in said
    assert "`stock` was stopped after 2 of 3 minibatches in 2.00 s: compare rows/s" in said


def test_no_ratio_is_printed_for_a_side_that_trained_on_less_than_a_tenth(dataset, bench, monkeypatch):
    trained = {True: 2, False: 1}  # of 20, with and without MADV_RANDOM

    def run(config, **_):
        batches = 20 if config.side == "gids" else trained[config.random_access]
        return epoch_result(config.side, batches=batches, rows=100 * batches)

    monkeypatch.setattr("gids.measure.sides.run_side", run)
    said, report = bench("epoch", dataset, *SMALL[:4], "--batch-size", 1, "--batches", 20)
    assert report["answers"] == ["gids loads 10.0 x as many rows per second as stock, MADV_RANDOM"]
    assert "note: `stock` was stopped after 1 of 20 minibatches in 2.00 s: too few for a ratio" in said


def test_no_side_begins_when_the_time_is_up(dataset, bench, monkeypatch):
    asked, clock = [], iter([0.0, 1.0, 9.0])

    def run(config, *, timeout_s, **_):
        asked.append((config.side, config.most_seconds, timeout_s))
        return epoch_result(config.side)

    monkeypatch.setattr("gids.measure.sides.run_side", run)
    monkeypatch.setattr(epoch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    said, report = bench("epoch", dataset, *SMALL, "--seconds", 7)
    assert asked == [("gids", 1, 122)]  # a third of the 6 s that are left, and half of it to train
    assert report["partial"] == "time"
    assert "PARTIAL: stopped by --seconds 7; number of results: 1" in said


def test_different_rows_are_an_error(dataset, bench, monkeypatch):
    monkeypatch.setattr(
        "gids.measure.sides.run_side", lambda config, **_: epoch_result(config.side, wrong_rows=1)
    )
    said, _ = bench("epoch", dataset, *SMALL, status=2)
    assert "1 of 32 rows from gids differ" in said


def test_a_note_says_that_stock_was_killed(dataset, bench, monkeypatch):
    reason = "needed more than 578 MB of memory and was killed by the kernel"
    asked = []

    def run(config, **_):
        asked.append((config.side, config.most_seconds, config.headroom_bytes))
        if config.side == "stock" and config.random_access:
            raise FreshProcessOutOfMemory("killed", reason)
        return epoch_result(config.side)

    monkeypatch.setattr("gids.measure.sides.run_side", run)
    said, report = bench("epoch", dataset, *SMALL)
    assert f"`stock, MADV_RANDOM` {reason}" in " ".join(said.split())
    assert [f["setting"]["side"] for f in report["figures"]] == ["gids", "stock"]
    assert report["answers"] == ["gids loads 1.0 x as many rows per second as stock"]
    assert report["subject"]["headroom_bytes"] == 70 << 20
    assert asked == [("gids", 0, 0), ("stock", 60, 70 << 20), ("stock", 15, 70 << 20)]


@pytest.mark.slow
def test_a_memory_limit_that_is_too_small_for_the_loader_is_an_error(dataset, bench, monkeypatch):
    train_here(monkeypatch)
    monkeypatch.setattr(epoch, "_LEAST_BYTES", 0)
    options = ["--batch-size", 300, "--fanouts", "8,8", "--window", 22, "--batches", 1]
    said, _ = bench("epoch", dataset, *options, "--sides", "gids", "--memory-limit", "10MB", status=2)
    assert "failed (exit status 1): MemoryBudgetError: memory=10000000 (10.0 MB) is too small" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": False}, "has no labels that are classes"),
        ({"train": 0}, "no node with classes of x.gids is in a train split"),
    ],
)
def test_missing_parts_of_the_dataset_are_named(tmp_path, bench, options, said):
    path = write(tmp_path / "x.gids", **options)
    text, _ = bench("epoch", path, *SMALL, status=2)
    assert said in text
