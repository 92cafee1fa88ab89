"""The GPU benchmarks run at their small sizes and verify their results: emulated, and on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gids.cuda import Device
from gids.io.device.device_queue import DeviceQueue

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import gpu


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("gather", "gather of 512 B rows, all hits, over device copy"),
        ("planning", "planning, over the planner on the CPU"),
        ("queue", "queue path, wait stream, over the engine on the host"),
        ("extents", "extents of 1024 KiB, engine into host memory"),
        ("sampling", "neighbour sampling 3,2, topology in pinned host memory"),
        ("training", "training rows/s, cuda over mapped, moved"),
    ],
)
def test_gpu_benchmark_runs(
    device: Device, cuda_is: Callable[[Device], None], tmp_path: Path, question: str, said: str
) -> None:
    cuda_is(device)
    figures = tmp_path / "figures.json"
    assert gpu.main([question, "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())["figures"]
    assert any(f["name"].startswith(said) for f in found)
    assert all(f["value"] >= 0 for f in found)


@pytest.mark.parametrize("wait", ["stream", "warp"])
def test_a_wrong_byte_in_the_last_round_of_the_queue_is_found(
    device: Device,
    cuda_is: Callable[[Device], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait: str,
) -> None:
    cuda_is(device)
    calls = 0

    def read_pages(queue: DeviceQueue, *args: Any) -> None:
        nonlocal calls
        read(queue, *args)
        if queue.wait_kind == wait:
            calls += 1
            if calls == 2:  # a warm-up, and one round
                args[0].synchronize()
                args[4][-1, -1] += 1

    read = DeviceQueue.read_pages
    monkeypatch.setattr(DeviceQueue, "read_pages", read_pages)
    with pytest.raises(AssertionError, match=f"wait {wait}: 1 of 300 pages are wrong"):
        gpu.main(["queue", "--small", "--dir", str(tmp_path)])
    assert calls == 2
