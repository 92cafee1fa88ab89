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
from order import order_faults  # noqa: E402


@pytest.mark.slow
def test_every_command_leaves_the_old_dataset_or_the_new_wherever_it_is_killed():
    """At some calls of each, other ones each time; `python tools/kill_writers --every 1` takes all."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    seed = random.SystemRandom().randrange(1 << 32)
    options = ["--kills", "32", "--losses", "24", "--seed", str(seed)]
    done = subprocess.run([sys.executable, TOOL, *options], capture_output=True, text=True, timeout=500)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    kills, losses, *_ = done.stdout.splitlines()[-1].split(", ")
    assert int(kills.split()[0]) >= 25
    assert int(losses.split()[0]) >= 18
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
    apply(disk, ("mkdir", "n"), ("exchange", "n", "/work/ssd/b.gids"))
    assert disk.contents() == {"n/manifest.json": b"old"}
    assert survivors(disk, tmp_path / "3", names=False) == {"ssd/b.gids/manifest.json": b"old"}


def test_a_link_is_a_second_name_of_the_same_data(disk, tmp_path):
    apply(disk, ("link", "a.gids/manifest.json", "/work/ssd/m"))
    assert survivors(disk, tmp_path / "1", names=False) == {"a.gids/manifest.json": b"old"}
    apply(disk, ("fsync", "ssd"), ("unlink", "a.gids/manifest.json"))
    assert disk.contents() == {"ssd/m": b"old"}
    assert survivors(disk, tmp_path / "2", names=False) == dict.fromkeys(
        ("a.gids/manifest.json", "ssd/m"), b"old"
    )


def test_call_that_is_not_simulated_fails(disk):
    with pytest.raises(NotImplementedError, match="not simulated"):
        apply(disk, ("unknown", "x"))
    apply(disk, ("failed", "y"))
    assert disk.at("/work/y") is None


MADE = [
    ("mkdir", "new"),
    ("create", "new/manifest.json", "0"),
    ("write", "new/manifest.json", "0", b"new"),
    ("fsync", "new/manifest.json"),
    ("create", "ssd/shard", "0"),
    ("fsync", "ssd/shard"),
    ("fsync", "ssd"),
    ("fsync", "new"),
]
PUBLISHED = [("exchange", "new", "/work/a.gids"), ("fsync", "")]
REMOVED = [("unlink", "new/manifest.json"), ("rmdir", "new")]


def found(disk, *calls):
    trace = [Call(n, f"/work/{p}".rstrip("/"), *rest) for n, p, *rest in calls]
    files = ["/work/a.gids/manifest.json", "/work/ssd/shard"]
    old = {"/work/a.gids/manifest.json"}
    return list(
        order_faults(disk, trace, dataset="/work/a.gids", new_files=files, old_files=old, sets_aside=False)
    )


def test_correct_order_has_no_faults(disk):
    assert found(disk, *MADE, *PUBLISHED, *REMOVED) == []


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([c for c in MADE if c != ("fsync", "new/manifest.json")] + PUBLISHED, "the data of /work/new/manif"),
        ([c for c in MADE if c != ("fsync", "new")] + PUBLISHED, "names in /work/new"),
        ([c for c in MADE if c != ("fsync", "ssd")] + PUBLISHED, "the name /work/ssd/shard"),
        ([*MADE, ("write", "ssd/shard", "0", b"x"), *PUBLISHED], "the data of /work/ssd/shard"),
        ([*MADE, PUBLISHED[0], *REMOVED, PUBLISHED[1]], "before the new name /work/a.gids is synced"),
        ([*MADE, PUBLISHED[0]], "the name /work/a.gids was never synced"),
        ([("truncate", "a.gids/manifest.json", "0"), *MADE, *PUBLISHED], "changes old data before the new"),
        (MADE, "nothing was published"),
    ],
)
def test_wrong_order_is_reported(disk, calls, message):
    faults = found(disk, *calls)
    assert faults
    assert message in faults[0]
