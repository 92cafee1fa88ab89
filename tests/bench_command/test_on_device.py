"""The bench commands with cache, rows and topology on a device: emulated, and on a GPU if available."""

from __future__ import annotations

from typing import Any

import torch
from open_options import tuned

import gids
from gids.trace import Trace, record


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
