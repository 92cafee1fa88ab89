"""Kills every command that writes at its system calls, and simulates a loss of power."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/kill_writers"


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
