"""`gids bench bandwidth`: results, ceilings, bad input. Speed is not checked."""

from __future__ import annotations

import errno

import pytest
import torch

from gids.bench import bandwidth
from gids.errors import StorageError
from gids.io import disks
from gids.write import DatasetWriter

SMALL = ("--batch-size", "8", "--fanouts", "3,3", "--iterations", 24)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)


def test_each_engine_is_compared_with_the_ceiling(dataset, bench, on_disk):
    _, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads", "--repeat", 2)
    raw, *engines = report["figures"]
    assert raw["metrics"]["of_ceiling"]["median"] == 1
    assert [figure["setting"]["engine"] for figure in engines] == ["threads"]
    for figure in engines:
        metrics = figure["metrics"]
        assert figure["setting"]["state"] == "cold"
        assert len(metrics["effective_bytes_per_s"]["values"]) == 2
        assert 0 < metrics["hit_ratio"]["median"] < 1
        assert len(metrics["of_ceiling"]["values"]) == 2


def test_rows_are_drawn_uniformly_without_topology(bench, tmp_path):
    with DatasetWriter(tmp_path / "rows.gids", page_bytes=4096, stripe=2) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(2000, 200))
    args = ("bandwidth", tmp_path / "rows.gids", "--iterations", 3, "--engines", "threads", "--cache", "100%")
    assert "can be sampled: give --rows N" in bench(*args, status=2)[0]
    said, report = bench(*args, "--rows", 100, "--depth", 16)
    assert "holds the whole table" in said
    assert (report["subject"]["shards"], report["subject"]["depth"]) == (2, 16)


def test_results_are_marked_warm_if_the_page_cache_cannot_be_dropped(dataset, bench, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(bandwidth, "drop_page_cache", refuse)
    said, report = bench("bandwidth", dataset, *SMALL, "--engines", "threads")
    assert "results are WARM: the page cache could not be emptied" in said
    for figure in report["figures"]:
        assert figure["setting"]["state"] == "warm"
        assert "of_ceiling" not in figure["metrics"]  # memory has another


def test_a_wrong_row_is_found_before_the_measurement(dataset, bench, monkeypatch):
    monkeypatch.setattr("gids.store.table.Table.read_rows", lambda _, ids: torch.zeros(len(ids), 1024))
    monkeypatch.setattr(bandwidth, "aggregate", None)
    said, _ = bench("bandwidth", dataset, *SMALL, "--engines", "threads", status=2)
    assert "engine 'threads' reads rows of '_N.feat' that differ" in said


def test_a_shard_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * 4096))
    sizes = iter([8 * 4096, 1 << 20])
    monkeypatch.setattr("os.path.getsize", lambda _: next(sizes, 8 * 4096))  # as if cut since then
    with pytest.raises(StorageError, match=r"shard\.bin at byte"):
        bandwidth.random_reads([path], page_bytes=4096, seconds=1)


@pytest.mark.parametrize(("rates", "best"), [([0.5], 0.5), ([0.9, 1.8], 1.8), ([0.9, 0.8], 0.9)])
def test_the_probe_is_not_limited_by_the_rings(tmp_path, monkeypatch, rates, best):
    (tmp_path / "shard").write_bytes(bytes(4096))
    left = list(rates)
    monkeypatch.setattr(bandwidth, "_random_reads", lambda *_, **__: left.pop(0) * disks.RING_READS_PER_S)
    found = bandwidth.random_reads([tmp_path / "shard"], page_bytes=4096, seconds=1)
    assert found.reads_per_s == best * disks.RING_READS_PER_S
    assert not left


def test_rows_are_aggregated_on_the_device(dataset, bench, device, cuda_is):
    """Emulated, and on a GPU if available."""
    cuda_is(device)
    small = ("--batch-size", 4, "--fanouts", "2,2", "--iterations", 4, "--engines", "threads", "--depth", 16)
    _, report = bench("bandwidth", dataset, *small, "--window", 2, "--device", "cuda")
    assert report["figures"][1]["metrics"]["effective_bytes_per_s"]["median"] > 0
    assert report["subject"]["device"] == "cuda"


def test_a_missing_gpu_is_reported_in_one_line(dataset, bench, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    said, _ = bench("bandwidth", dataset, *SMALL, "--device", "cuda", status=2)
    assert "gids bench: device='cuda' needs a CUDA build of torch; this is " in said
    assert "GIDS_TRACEBACK" not in said
