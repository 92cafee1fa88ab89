"""The GPU benchmarks run at their small sizes and verify their results: emulated, and on a GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from late_device import LateDevice

from gids.cuda import Device

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import gpu

from gids.io.device.device_queue import DeviceQueue


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("bus", "loads from pinned host memory, 3 blocks of 256"),
        ("gather", "gather of 512 B rows, all hits, over device copy"),
        ("planning", "planning, over the planner on the CPU"),
        ("queue", "queue path, wait stream, over the engine on the host"),
        ("extents", "extents of 1024 KiB, engine into host memory"),
        ("sampling", "neighbour sampling 3,2, topology in pinned host memory"),
        ("overlap", "training beside sampling, over alone"),
        ("life", "smallest over first cache of 5 loaders without a size"),
        ("large", "seeds whose neighbors are right, 4,096 edges"),
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


@pytest.fixture(params=["late", pytest.param("cuda", marks=pytest.mark.gpu)])
def late_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device whose streams wait on their own."""
    if request.param == "cuda":
        yield request.getfixturevalue("gpu")
        return
    with contextlib.closing(LateDevice(1)) as late:
        yield late


def test_streams_beside_a_waiting_one_run(
    late_device: Device, cuda_is: Callable[[Device], None], tmp_path: Path
) -> None:
    cuda_is(late_device)
    figures = tmp_path / "figures.json"
    assert gpu.main(["streams", "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    found = {f["name"].partition(",")[0]: f["value"] for f in json.loads(figures.read_text())["figures"]}
    assert found["a stream can wait for a word in host memory"] == 1
    assert found["streams that run beside one that waits"] > 0


def test_a_stream_that_is_held_up_is_counted(
    cuda_is: Callable[[Device], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting stream is also one of the others."""
    figures = tmp_path / "figures.json"
    with contextlib.closing(LateDevice(1)) as late:
        cuda_is(late)
        shared = late.new_stream()
        made = iter([late.new_stream(), late.new_stream(), shared, shared])
        monkeypatch.setattr(late, "new_stream", lambda: next(made))
        assert gpu.main(["streams", "--small", "--dir", str(tmp_path), "--json", str(figures)]) == 0
    found = {f["name"]: f["value"] for f in json.loads(figures.read_text())["figures"]}
    (held,) = [value for name, value in found.items() if "other streams of gids" in name]
    assert held == pytest.approx(2 / 3)
