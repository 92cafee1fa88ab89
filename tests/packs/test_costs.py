"""How long a disk is measured, and what comes out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest

from gids import _core
from gids.packs import Scratch, costs, measure_random, measure_rates

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
    monkeypatch.setattr(costs, "_known", {})
    file = tmp_path / "file"
    file.write_bytes(bytes(8 * MIB))
    scratch = Scratch([tmp_path], 256 * MIB)
    for on in (scratch, None):
        found = [
            measure_rates([file], on, page_bytes=512, depth=16, direct=False, engine="threads")
            for _ in range(2)
        ]
        assert found[0] is found[1]
        assert found[0].random_reads_per_s > 0
        assert found[0].read_bytes_per_s > 0
        assert (found[0].write_bytes_per_s > 0) == (on is not None)
    assert not scratch.taken_bytes


@pytest.mark.parametrize("slow", [True, False])
def test_a_disk_that_was_busy_for_a_moment_is_not_taken_for_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    rates = [3000.0, 2000.0 if slow else 90_000.0, 1.0]
    monkeypatch.setattr(costs, "_known", {})
    monkeypatch.setattr(costs, "_random_reads_per_s", lambda *_: rates.pop(0))
    (tmp_path / "file").write_bytes(bytes(8 * MIB))
    for _ in range(2):
        rate = measure_random([tmp_path / "file"], page_bytes=512, depth=16, direct=False, engine="threads")
        assert rate == (3000.0 if slow else 90_000.0)


def test_directories_are_written_and_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_known", {})
    monkeypatch.setattr(costs, "_DOUBTED", 0)  # random reads are measured once
    monkeypatch.setattr(costs, "device_of", lambda path: path)
    file, directories, writers = tmp_path / "file", [tmp_path / "a", tmp_path / "b"], {}
    file.write_bytes(bytes(8 * MIB))
    for directory in directories:
        directory.mkdir()
    scratch = Scratch(directories, 256 * MIB)
    both, write = threading.Barrier(2, timeout=10), os.pwrite

    def noted(fd: int, data: Any, offset: int) -> int:
        if offset == 0:
            both.wait()  # so both are written at a time
        writers[fd] = writers.get(fd, 0) + (count := write(fd, data, offset))
        return count

    monkeypatch.setattr(costs.os, "pwrite", noted)
    read, opened = [], costs.open_engine

    def opening(paths: Any, *args: Any, **options: Any) -> Any:
        read.append(len(paths))
        return opened(paths, *args, **options)

    monkeypatch.setattr(costs, "open_engine", opening)
    rates = measure_rates([file], scratch, page_bytes=512, depth=16, direct=True, engine="threads")
    assert len(writers) == 2
    assert len(set(writers.values())) == 1
    assert rates.write_bytes_per_s > 0
    assert read == [1, 1, 2]  # at random, the table's long reads, those of scratch
    assert rates.packed_bytes_per_s
    assert rates.packed_s(rates.packed_bytes_per_s) == 1
    assert not scratch.taken_bytes


@pytest.mark.parametrize("sizes", [[10, 0, 25], [7], [0], [10, 10]])
def test_long_reads_take_files_in_turn(sizes: list[int]) -> None:
    for _ in range(5):
        pieces = list(costs._pieces(sizes, 10))
        assert sorted(pieces) == [
            (file, at, min(10, size - at)) for file, size in enumerate(sizes) for at in range(0, size, 10)
        ]


class SlowDisk:
    """In place of an engine: a disk with so many reads, and bytes, per second. The clock is its own."""

    def __init__(self, reads_per_s: float, bytes_per_s: float) -> None:
        self.now, self.reads, self.most_bytes = 0.0, 0, 0
        self._busy_until = 0.0
        self._read_s, self._byte_s = 1 / reads_per_s, 1 / bytes_per_s
        self.native: Any = self

    def open(self, *_: Any, depth: int, max_read_bytes: int, **__: Any) -> SlowDisk:
        self.most_bytes = max(self.most_bytes, depth * max_read_bytes)
        return self

    def __enter__(self) -> SlowDisk:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def read(self, files: np.ndarray, offsets: np.ndarray, nbytes: int, out: np.ndarray) -> np.ndarray:
        assert out.shape == (len(files), nbytes)
        self.most_bytes = max(self.most_bytes, out.nbytes)
        self.reads += len(files)
        self.now += len(files) * self._read_s + out.nbytes * self._byte_s
        return np.zeros(len(files), np.int32)

    def long_read(self, _: Any, __: Any, file: int, offset: int, to: Any, at: int, nbytes: int) -> Any:
        assert at + nbytes <= to.nbytes
        self.most_bytes = max(self.most_bytes, to.nbytes)
        self.reads += 1
        self._busy_until = max(self.now, self._busy_until) + nbytes * self._byte_s
        return SimpleNamespace(wait=partial(self._pass, self._busy_until))

    def _pass(self, until: float) -> None:
        self.now = max(self.now, until)


@pytest.mark.parametrize("memory", [16 * MIB, 300 * MIB, None])
@pytest.mark.parametrize("page_bytes", [512, 4096, MIB])
@pytest.mark.parametrize(("reads_per_s", "bytes_per_s"), [(150, 100e6), (20, 1e6), (300_000, 3e9)])
def test_measuring_is_bounded_in_seconds_and_in_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: int | None,
    page_bytes: int,
    reads_per_s: float,
    bytes_per_s: float,
) -> None:
    disk = SlowDisk(reads_per_s, bytes_per_s)
    monkeypatch.setattr(costs, "_known", {})
    monkeypatch.setattr(costs, "open_engine", disk.open)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: disk.now)
    monkeypatch.setattr(_core, "PackRead", disk.long_read)
    file = tmp_path / "file"
    with open(file, "wb") as made:
        made.truncate(8 << 30)
    options: dict[str, Any] = {"depth": 256, "direct": False, "engine": "threads"}
    rates = measure_rates([file], None, page_bytes=page_bytes, memory_bytes=memory, **options)
    assert rates.random_reads_per_s == pytest.approx(
        1 / (1 / reads_per_s + page_bytes / bytes_per_s), rel=0.01
    )
    assert rates.read_bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert disk.most_bytes <= max((memory or 1 << 40) // 16, 4 * 256 << 10, page_bytes)
    assert disk.most_bytes <= 32 * MIB
    # 17 random reads, and 2 long ones, are made in any case.
    seconds = 17 * (1 / reads_per_s + page_bytes / bytes_per_s) + 2 * 4 * (256 << 10) / bytes_per_s
    assert disk.now < 3 + 2 * seconds
    if reads_per_s < 1000:
        assert disk.reads < 400
