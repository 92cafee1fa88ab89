"""Kills commands at their system calls, and simulates a loss of power on a disk in memory."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/kill_writers"
sys.path.append(str(TOOL))

from disk import Call, Disk  # noqa: E402


@pytest.mark.slow
def test_every_command_leaves_no_dataset_or_a_whole_one_wherever_it_is_killed():
    """At some calls of each, other ones each time; `python tools/kill_writers --every 1` takes all."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    seed = random.SystemRandom().randrange(1 << 32)
    options = ["--every", "1000", "--seed", str(seed)]
    done = subprocess.run([sys.executable, TOOL, *options], capture_output=True, text=True, timeout=500)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    kills, losses, *_ = done.stdout.splitlines()[-1].split(", ")
    assert int(kills.split()[0]) >= 13
    assert int(losses.split()[0]) >= 13
    assert done.stdout.splitlines()[-1].endswith(" commands: 0 faults")


@pytest.fixture
def disk(tmp_path):
    """a.gids with a manifest, and an empty directory."""
    (tmp_path / "work/a.gids").mkdir(parents=True)
    (tmp_path / "work/ssd").mkdir()
    (tmp_path / "work/a.gids/manifest.json").write_bytes(b"old")
    return Disk(Path("/work"), tmp_path / "work")


def apply(disk, *calls):
    for name, path, *rest in calls:
        second, data = (*rest, "", b"")[:2] if rest else ("", b"")
        disk.apply(Call(name, f"/work/{path}", second, data))


def survivors(disk, folder, *, names):
    folder.mkdir()
    disk.write_survivors(folder, names=names)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


WRITTEN = [("create", "x", "0"), ("write", "x", "0", b"abcd"), ("fsync", "x"), ("write", "x", "4", b"ef")]


def test_data_survives_when_its_file_was_synced_and_a_name_when_its_directory_was(disk, tmp_path):
    old = {"a.gids/manifest.json": b"old"}
    apply(disk, *WRITTEN)
    assert survivors(disk, tmp_path / "1", names=False) == old
    assert survivors(disk, tmp_path / "2", names=True) == old | {"x": b"abcd\0\0"}
    apply(disk, ("fsync", ""))
    assert survivors(disk, tmp_path / "3", names=False) == old | {"x": b"abcd"}
    apply(disk, ("truncate", "x", "2"), ("unlink", "a.gids/manifest.json"))
    assert survivors(disk, tmp_path / "4", names=False) == old | {"x": b"abcd"}
    assert survivors(disk, tmp_path / "5", names=True) == {"x": b"ab"}
    assert disk.contents() == {"x": b"ab"}


def test_a_rename_survives_in_both_directories_or_in_neither(disk, tmp_path):
    apply(disk, ("rename", "a.gids", "/work/ssd/b.gids"))
    assert survivors(disk, tmp_path / "1", names=False) == {"a.gids/manifest.json": b"old"}
    apply(disk, ("fsync", "ssd"))
    assert survivors(disk, tmp_path / "2", names=False) == {"ssd/b.gids/manifest.json": b"old"}
