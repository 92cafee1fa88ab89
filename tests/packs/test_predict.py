"""How long a disk is measured, what comes out, and what that says of a superbatch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gids.packs import DiskRates, Scratch, measure_rates, predict

costs: Any = importlib.import_module("gids.packs.predict")

MIB = 1 << 20


def even(at: float) -> float:
    return 2000 * at


def limited(at: float) -> float:
    """2000 MiB/s until the 80 MiB of each 0.1 s have passed."""
    slices, rest = divmod(at, 0.1)
    return 80 * slices + min(80, 2000 * rest)


def stopped_early(at: float) -> float:
    return 2000 * (at if at < 0.02 else max(0.02, at - 0.06))


@pytest.mark.parametrize(("passed", "rate"), [(even, 2000), (limited, 800), (stopped_early, 2000)])
def test_the_beginning_does_not_count(
    monkeypatch: pytest.MonkeyPatch, passed: Callable[[float], float], rate: float
) -> None:
    now = 0.0
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now)
    marks, count = costs._Marks(), 0
    while not marks.enough:
        count += 4
        while passed(now) < count:
            now += 1e-4
        marks.add(4 * MIB)
    assert now == pytest.approx(0.3, abs=0.05)
    assert marks.rate() / MIB == pytest.approx(rate, rel=0.25)


def test_rates_of_a_disk_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "known_rates", {})
    file = tmp_path / "file"
    file.write_bytes(bytes(8 * MIB))
    scratch = Scratch([tmp_path], 256 * MIB)
    found = [
        measure_rates([file], scratch, direct=False, engine="threads", memory_bytes=64 * MIB)
        for _ in range(2)
    ]
    assert found[0] is found[1]
    assert min(found[0].read, found[0].write, found[0].packed) > 0
    assert scratch.free_bytes == 256 * MIB


def test_seconds_of_a_superbatch() -> None:
    rates = DiskRates(read=2e9, write=1e9, packed=4e9)
    counts = {"swept_bytes": 4 * 10**9, "copied_bytes": 8 * 10**9, "uses": 20_000_000}
    assert predict(rates, random_s=90.0, **counts) == {"random": 90.0, "pack": 2 + 8 + 2 + 1}


@pytest.mark.parametrize("sizes", [[10, 0, 25], [7]])
def test_long_reads_take_files_in_turn(sizes: list[int]) -> None:
    for _ in range(5):
        pieces = list(costs._pieces(sizes, 10))
        assert sorted(pieces) == [
            (file, at, min(10, size - at)) for file, size in enumerate(sizes) for at in range(0, size, 10)
        ]


class SlowDisk:
    """In place of an engine: a disk with so many bytes per second. The clock is its own."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now, self.most_bytes, self._byte_s = 0.0, 0, 1 / bytes_per_s

    def open(self, *_: Any, **__: Any) -> SlowDisk:
        return self

    def __enter__(self) -> SlowDisk:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def read_extents(self, *args: np.ndarray) -> None:
        _, _, lengths, out, _ = args
        self.most_bytes = max(self.most_bytes, out.nbytes)
        self.now += int(lengths.sum()) * self._byte_s


@pytest.mark.parametrize(("memory", "bytes_per_s"), [(16 * MIB, 100e6), (300 * MIB, 1e6), (8 << 30, 3e9)])
def test_measuring_is_bounded_in_seconds_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, bytes_per_s: float
) -> None:
    disk = SlowDisk(bytes_per_s)
    monkeypatch.setattr(costs, "known_rates", {})
    monkeypatch.setattr(costs, "open_engine", disk.open)
    monkeypatch.setattr(costs, "writes_per_s", lambda *_: 5.0)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: disk.now)
    file = tmp_path / "file"
    with open(file, "wb") as made:
        made.truncate(8 << 30)
    scratch = Scratch([tmp_path], 256 * MIB)
    rates = measure_rates([file], scratch, direct=False, engine="threads", memory_bytes=memory)
    assert rates == DiskRates(pytest.approx(bytes_per_s, rel=0.01), 5.0, pytest.approx(bytes_per_s, rel=0.01))
    assert disk.most_bytes <= min(32 * MIB, memory // 16)
    assert disk.now < 2 + 2 * disk.most_bytes / bytes_per_s  # two reads are made in any case
