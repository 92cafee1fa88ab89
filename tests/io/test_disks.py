"""The disks behind files and the rings of the engine, on machines that are described by files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import gids
from gids import _core
from gids.io import disks
from gids.io.disks import disks_of, ring_count

DEVICES = {  # by number: the folder below devices/
    "259:0": "pci0/nvme0/nvme0n1",
    "259:1": "pci0/nvme0/nvme0n1/nvme0n1p1",
    "259:2": "pci0/nvme0/nvme0n1/nvme0n1p2",
    "259:3": "pci0/nvme1/nvme1n1",
    "259:4": "pci0/nvme2/nvme2n1",
    "259:5": "pci0/nvme2/nvme2n1/nvme2n1p1",
    "9:0": "virtual/block/md0",
    "253:0": "virtual/block/dm-0",
}
SLAVES = {"9:0": ["259:3", "259:5"], "253:0": ["9:0"]}  # a volume on an array of two disks


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """on(name, number): a file in a directory of its own, on the device of a number of DEVICES or another."""
    sysfs, numbers = tmp_path / "sys", {}
    (sysfs / "dev/block").mkdir(parents=True)
    for number, folder in DEVICES.items():
        at = sysfs / "devices" / folder
        (at / "slaves").mkdir(parents=True, exist_ok=True)
        (sysfs / "dev/block" / number).symlink_to(at)
        if at.parent.name.startswith("nvme") and at.name.startswith(f"{at.parent.name}p"):
            (at / "partition").write_text("1\n")
        for slave in SLAVES.get(number, []):
            (at / "slaves" / Path(DEVICES[slave]).name).symlink_to(sysfs / "devices" / DEVICES[slave])
    monkeypatch.setattr(disks, "SYSFS", sysfs)
    monkeypatch.setattr(disks, "device_of", lambda path: numbers[os.fspath(path)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def make(name: str, number: str) -> Path:
        path = tmp_path / name / "shard.bin"
        path.parent.mkdir()
        path.write_bytes(bytes(1 << 16))
        major, minor = map(int, number.split(":"))
        numbers[str(path)] = os.makedev(major, minor)
        return path

    return make


@pytest.mark.parametrize(
    ("number", "found"),
    [
        ("259:0", {"nvme0n1"}),
        ("259:2", {"nvme0n1"}),
        ("253:0", {"nvme1n1", "nvme2n1"}),
        ("0:47", {"0:47"}),
    ],
)
def test_partitions_and_arrays_lead_to_their_disks(
    on: Callable[[str, str], Path], number: str, found: set[str]
) -> None:
    assert disks_of(on("shards", number)) == found


@pytest.mark.parametrize(
    ("numbers", "rings"),
    [
        (["259:1", "259:2"], 1),  # two partitions of one SSD
        (["259:1", "259:3"], 2),  # two SSDs
        (["253:0"], 2),  # one file system on two SSDs
        (["253:0", "259:5", "259:0"], 3),
    ],
)
def test_uring_begins_with_a_ring_per_disk(
    on: Callable[[str, str], Path], numbers: list[str], rings: int
) -> None:
    paths = [on(f"directory-{i}", number) for i, number in enumerate(numbers)]
    assert ring_count(paths) == rings
    if reason := _core.why_no_uring():
        pytest.skip(f"no io_uring: {reason}")
    with gids.io.open_engine(paths, "uring", direct=False) as engine:
        assert engine.stats()["threads"] == rings


def test_an_engine_has_256_requests_in_flight_per_disk_and_64_per_further_core(
    on: Callable[[str, str], Path],
) -> None:
    partitions = [on("one", "259:1"), on("other", "259:2")]
    paths = [*partitions, on("array", "253:0")]  # of two disks
    assert [gids.io.queue_depth(paths[:n], "uring") for n in (0, 1, 2, 3)] == [704, 704, 704, 1088]
    assert gids.io.queue_depth(paths, "threads") == 256, "each request takes a thread"
    if reason := _core.why_no_uring():
        pytest.skip(f"no io_uring: {reason}")
    for depth, expected in ((None, 1088), (100, 100)):
        with gids.io.open_engine(paths, "uring", direct=False, depth=depth) as engine:
            assert engine.depth == expected
