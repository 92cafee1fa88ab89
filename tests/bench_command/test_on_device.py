"""The bench commands with cache, rows and topology on a device: emulated, and on a GPU if available."""

from __future__ import annotations

from typing import Any

import torch
from open_options import tuned

import gids
from gids.bench import bandwidth
from gids.trace import Trace, record


def test_rows_are_aggregated_on_the_device(dataset, bench, device, cuda_is, monkeypatch):
    cuda_is(device)
    monkeypatch.setattr(bandwidth, "_PROBE_S", 0.05)
    small = ("--batch-size", 4, "--fanouts", "2,2", "--iterations", 4, "--engines", "threads", "--depth", 16)
    _, report = bench("bandwidth", dataset, *small, "--window", 2, "--device", "cuda")
    (figure,) = (f for f in report["figures"] if f["setting"]["engine"] == "threads")
    assert figure["metrics"]["effective_bytes_per_s"]["median"] > 0
    assert report["subject"]["device"] == "cuda"


def test_minibatches_are_sampled_on_the_device(dataset, bench, device, cuda_is):
    cuda_is(device)
    small = ("--batch-size", 4, "--fanouts", "2,2", "--batches", 2)
    _, report = bench("sampling", dataset, *small, "--device", "cuda")
    (figure,) = report["figures"]
    _, on_host = bench("sampling", dataset, *small, "--threads", 1)
    for name in ("nodes_per_batch", "edges_per_batch"):
        assert figure["metrics"][name] == on_host["figures"][0]["metrics"][name]


def test_a_run_on_the_device_is_recorded(dataset, bench, device, cuda_is, tmp_path):
    cuda_is(device)
    path = tmp_path / "run.trace"
    seeds = torch.arange(0, 600, 10)
    options: dict[str, Any] = {"device_memory": 64 << 20, "cache": 1 << 20, "window": 4}
    with gids.NodeLoader(
        gids.open(dataset, **tuned(options)), seeds, [2, 2], batch_size=8, device="cuda", topology_on="host"
    ) as loader:
        with record(loader, path):
            for _ in loader:
                pass
        pages = loader.stats()["pages"]
    with Trace(path) as trace:
        assert trace.device == "cuda"
        assert trace.batch_count == 8
        assert int(trace.page_counts().sum()) == pages
    said, _ = bench("hit-ratio", "--replay", path, "--cache", "10%", "--policies", "lookahead")
    assert "the run was on cuda" in said
