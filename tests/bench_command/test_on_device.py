"""The bench commands with cache, rows and topology on a device: emulated, and on a GPU if available."""

from __future__ import annotations

from gids.bench import bandwidth


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
