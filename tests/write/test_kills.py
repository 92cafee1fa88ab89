"""Kills every command that writes at its system calls, and simulates a loss of power."""

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


def test_data_survives_when_its_file_was_synced_and_a_name_when_its_directory_was(tmp_path):
    (tmp_path / "work/ssd").mkdir(parents=True)
    (tmp_path / "work/m").write_bytes(b"old")

    def survivors(folder, *, names):
        disk.write_survivors(tmp_path / folder, names=names)
        return Disk(Path("/work"), tmp_path / folder).contents()

    x, disk = "/work/x", Disk(Path("/work"), tmp_path / "work")
    written = [Call("write", x, "0", b"abcd"), Call("fsync", x), Call("write", x, "4", b"ef")]
    for call in (Call("create", x), *written, Call("rename", "/work/m", "/work/ssd/m")):
        disk.apply(call)
    assert survivors("1", names=False) == {"m": b"old"}
    assert survivors("2", names=True) == {"x": b"abcd\0\0", "ssd/m": b"old"}
    disk.apply(Call("fsync", "/work"))
    assert survivors("3", names=False) == {"x": b"abcd", "ssd/m": b"old"}
    with pytest.raises(NotImplementedError):
        disk.apply(Call("unknown", x))
