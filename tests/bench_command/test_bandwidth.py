"""`gids bench bandwidth`: results, ceilings, latencies, bad input. Speed is not checked."""

from __future__ import annotations

import errno
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gids.io
from gids.bench import bandwidth
from gids.errors import StorageError
from gids.io import disks
from gids.write import DatasetWriter

SMALL = ("--batch-size", "8", "--fanouts", "3,3", "--iterations", 24)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)


def figures(report, engine):
    return [f for f in report["figures"] if f["setting"]["engine"] == engine]


def test_each_engine_is_compared_with_the_ceiling(dataset, bench, on_disk):
    engines = ("threads", "mmap")
    args = ("--engines", ",".join(engines), "--repeat", 2)
    _, report = bench("bandwidth", dataset, *SMALL, *args)
    (raw,) = figures(report, "raw probe")
    assert raw["metrics"]["of_ceiling"]["median"] == 1
    for engine in engines:
        (figure,) = figures(report, engine)
        metrics = figure["metrics"]
        assert figure["setting"]["state"] == "cold"
        assert len(metrics["effective_bytes_per_s"]["values"]) == 2
        assert 0 < metrics["hit_ratio"]["median"] < 1
        assert metrics["latency_p50_s"]["median"] <= metrics["latency_p99_s"]["median"]
        assert len(metrics["of_ceiling"]["values"]) == 2


def test_without_topology_rows_are_drawn_uniformly(bench, tmp_path):
    with DatasetWriter(tmp_path / "rows.gids", page_bytes=4096, stripe=2) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(2000, 200))
    args = ("--engines", "threads", "--cache", "100%", "--depth", "16,32")
    said, report = bench("bandwidth", tmp_path / "rows.gids", "--iterations", 3, *args)
    assert "minibatches are uniform random rows" in said
    assert "holds the whole table" in said
    assert report["subject"]["shards"] == 2
    assert [f["setting"]["depth"] for f in figures(report, "threads")] == [16, 32]


def test_results_are_marked_warm_if_the_page_cache_cannot_be_dropped(dataset, bench, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(bandwidth, "drop_page_cache", refuse)
    said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert "results are WARM: the page cache could not be emptied" in said
    for engine in ("raw probe", "threads"):
        (figure,) = figures(report, engine)
        assert figure["setting"]["state"] == "warm"
        assert "of_ceiling" not in figure["metrics"]  # memory has another


def test_a_wrong_row_is_found_before_the_measurement(dataset, bench, monkeypatch):
    def wrong(self, ids):
        return torch.zeros(len(ids), 1024)

    monkeypatch.setattr("gids.store.table.Table.read_rows", wrong)
    monkeypatch.setattr(bandwidth, "aggregate", None)
    said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads", status=2)
    assert "engine 'threads' reads rows of '_N.feat' that differ" in said


def test_a_shard_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    sizes = iter([1 << 20])
    monkeypatch.setattr("os.path.getsize", lambda _: next(sizes, 8 * 4096))  # as if cut since then
    with pytest.raises(StorageError, match=r"shard\.bin at byte"):
        bandwidth.random_reads([path], page_bytes=4096, seconds=1)


def test_a_small_file_is_read_several_times(tmp_path, monkeypatch):
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    clock = itertools.count()
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(clock)))
    for seconds, several in ((-1.0, False), (0.001, False), (0.05, True)):
        assert (bandwidth.random_reads([path], page_bytes=4096, seconds=seconds).passes > 1) == several


ROOM = "note: the whole table fits into the page cache, so mmap measures memory"


def test_a_note_above_the_table_says_that_mmap_measures_memory(dataset, bench, on_disk):
    said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads,mmap")
    assert 0 < said.index(ROOM) < said.index("raw probe")
    assert "systemd-run --scope -p MemoryMax=BYTES gids bench" in " ".join(said.split())
    assert sum("fits into the page cache" in note for note in report["notes"]) == 1


def test_direct_io_needs_no_note_about_the_page_cache(dataset, bench, on_disk):
    _, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert not any("fits into the page cache" in note for note in report["notes"])


def test_a_note_says_that_threads_without_direct_io_measure_memory(dataset, bench, monkeypatch):
    found = {"direct": False, "direct_note": "refused", "file_system": "none"}
    for module in ("gids.io.engine", "gids.bench.bandwidth"):
        monkeypatch.setattr(f"{module}.probe", lambda _: found)
    said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert "so threads measures memory" in said


def test_percentiles_follow_the_histogram():
    ends = np.array([1e-6, 2e-6, 3e-6, 4e-6])
    latencies = bandwidth.percentiles(ends, np.array([50, 40, 0, 10]))
    assert latencies == {"latency_p50_s": 1e-6, "latency_p99_s": 4e-6, "latency_p999_s": 4e-6}
    assert bandwidth.percentiles(ends, np.zeros(4, np.int64)) == {}


@pytest.mark.parametrize(
    ("limit", "speeds", "rings", "best"),
    [
        (1e6, [100], [1], 100),  # far below what a ring can do
        (100, [90, 150, 290], [1, 2, 4], 290),  # the third is all cores
        (100, [90, 92], [1, 2], 90),  # more rings do not help: the disk is the limit
    ],
)
def test_the_probe_is_not_limited_by_the_rings(tmp_path, monkeypatch, limit, speeds, rings, best):
    path, opened, left = tmp_path / "shard", [], list(speeds)
    path.write_bytes(bytes(4096 * 10))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    for module in (disks, bandwidth):
        monkeypatch.setattr(module, "RING_READS_PER_S", limit)

    def random_reads(*args):
        opened.append(args[5])
        return bandwidth.RawReads(left.pop(0), 1)

    monkeypatch.setattr(bandwidth, "_random_reads", random_reads)
    assert bandwidth.random_reads([path], page_bytes=4096, seconds=1).reads_per_s == best
    assert opened == rings


def test_every_request_is_counted_once(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with gids.io.open_engine([path], "threads", direct=False, max_merge_bytes=0) as engine:
        ends, before = engine.latencies()
        assert not before.any()
        out = np.empty((200, 4096), np.uint8)
        offsets = np.random.default_rng(0).integers(0, 256, 200) * 4096
        assert not engine.read(np.zeros(200, np.uint32), offsets, 4096, out).any()
        _, counts = engine.latencies()
        stats = engine.stats()
    assert counts.sum() == stats["requests"] == 200
    # The mean lies between those of the buckets' beginnings and ends.
    begins = np.concatenate([[0], ends[:-1]])
    assert (begins * counts).sum() / 200 <= stats["latency_s"] <= (ends * counts).sum() / 200


def test_buckets_are_a_sixteenth_of_a_doubling(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with gids.io.open_engine([path], "threads", direct=False) as engine:
        ends, _ = engine.latencies()
    assert ends[0] == 1e-9
    assert (np.diff(ends) > 0).all()
    assert ends[-1] > 3600
    wide = ends > 16e-9
    assert (np.diff(ends)[wide[:-1]] / ends[:-1][wide[:-1]] <= 1 / 16 + 1e-9).all()
