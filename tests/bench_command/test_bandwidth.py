"""`gids bench bandwidth`: results, ceilings, bad input. Speed is not checked."""

from __future__ import annotations

import errno

import pytest
import torch

from gids.bench import bandwidth
from gids.write import DatasetWriter

SMALL = ("--rows", 100, "--iterations", 24)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    def short(*args, **options):
        return random_reads(*args, **options | {"seconds": 0.05})

    random_reads = bandwidth.random_reads
    monkeypatch.setattr(bandwidth, "random_reads", short)
    monkeypatch.setattr(bandwidth, "ENGINES", ("threads",))


def test_each_engine_is_compared_with_the_ceiling(bench, plot, tmp_path, on_disk):
    """A dataset without a graph is enough."""
    with DatasetWriter(tmp_path / "rows.gids", page_bytes=4096, stripe=2) as writer:
        writer.write_table("node", "_N", "feat", torch.randn(2000, 200))
    _, report = bench("bandwidth", tmp_path / "rows.gids", *SMALL, "--depth", 16, *plot)
    assert (report["subject"]["shards"], report["subject"]["depth"]) == (2, 16)
    raw, threads = report["figures"]
    assert raw["metrics"]["of_ceiling"] == 1
    assert threads["setting"] == {"engine": "threads", "state": "cold"}
    metrics = threads["metrics"]
    assert 0 < metrics["effective_bytes_per_s"] < metrics["device_bytes_per_s"]
    assert metrics["of_ceiling"] > 0


def test_results_are_marked_warm_if_the_page_cache_cannot_be_dropped(dataset, bench, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(bandwidth, "drop_page_cache", refuse)
    said, report = bench("bandwidth", dataset, *SMALL)
    assert "results are WARM: the page cache could not be emptied" in said
    for figure in report["figures"]:
        assert figure["setting"]["state"] == "warm"
        assert "of_ceiling" not in figure["metrics"]  # memory has another


def test_a_wrong_row_is_found_before_the_measurement(dataset, bench, monkeypatch):
    monkeypatch.setattr("gids.store.table.Table.read_rows", lambda _, ids: torch.zeros(len(ids), 1024))
    said, _ = bench("bandwidth", dataset, *SMALL, status=2)
    assert "engine 'threads' reads rows of '_N.feat' that differ" in said


def test_rows_are_aggregated_on_the_device(dataset, bench, device, cuda_is):
    """Emulated, and on a GPU if available."""
    cuda_is(device)
    small = ("--rows", 20, "--iterations", 4, "--depth", 16)
    _, report = bench("bandwidth", dataset, *small, "--device", "cuda")
    assert report["figures"][1]["metrics"]["effective_bytes_per_s"] > 0
    assert report["subject"]["device"] == "cuda"


def test_a_missing_gpu_is_reported_in_one_line(dataset, bench, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    said, _ = bench("bandwidth", dataset, *SMALL, "--device", "cuda", status=2)
    assert "gids bench: device='cuda' needs a CUDA build of torch; this is " in said
    assert "GIDS_TRACEBACK" not in said
