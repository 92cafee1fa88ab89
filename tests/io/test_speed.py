"""gids.io.speed: how many reads, and minibatches, must be pending so that disks are busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gids.io.speed import DiskSpeed, measure_speed


@pytest.mark.parametrize(
    ("reads_per_s", "latency_s", "share", "pending"),
    [
        (1e6, 100e-6, 0.95, 1900),  # an NVMe SSD
        (9e4, 100e-6, 0.95, 171),  # a virtual disk
        (1e6, 100e-6, 0.5, 100),
        (0, 0, 0.95, 0),
    ],
)
def test_pending_reads_reach_the_share_of_the_peak(
    reads_per_s: float, latency_s: float, share: float, pending: float
) -> None:
    speed = DiskSpeed(reads_per_s, latency_s)
    assert speed.pending(share) == pytest.approx(pending)
    if pending:  # they take pending / reads_per_s at the peak, and latency_s more
        busy_s = pending / reads_per_s
        assert busy_s / (busy_s + latency_s) == pytest.approx(share)


@pytest.mark.parametrize(
    ("pages", "hit_ratio", "planned"),
    [
        (4899, 0.0, 2),
        (4901, 0.0, 1),
        (2500, 0.9, 20),
        (100, 1.0, 4900),
        (0, 0.0, 4900),
    ],
)
def test_only_misses_reach_the_disks(pages: float, hit_ratio: float, planned: int) -> None:
    speed = DiskSpeed(1e6, 100e-6)
    assert abs(speed.minibatches(pages, hit_ratio) - planned) <= (hit_ratio > 0)  # rounding of 1 - hit_ratio
    assert DiskSpeed(0.0, 0.0).minibatches(pages, hit_ratio) == 1


@pytest.mark.parametrize("kind", ["auto", "mmap"])
def test_the_speed_of_a_disk_is_measured(tmp_path: Path, kind: str) -> None:
    """One file is empty, and one has a part of a page."""
    sizes = {"a": 512 << 7, "b": 0, "c": 512 * 3 + 100}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    files = [tmp_path / name for name in sizes]
    for most_bytes in (1 << 20, 1):
        speed = measure_speed(files, 512, kind, depth=8, direct=True, most_bytes=most_bytes)
        assert speed.reads_per_s > 0
        assert speed.latency_s > 0
    assert measure_speed(files, 1 << 20, kind, depth=8, direct=True, most_bytes=1 << 20) == DiskSpeed(0, 0)
