"""Mapped files that cannot be read: StorageError where gids reads them, and the process lives."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

PROGRAM = Path(__file__).with_name("mapped_program.py")
CASES = 68
"""Cases that the program has, at least: it must not end early without an error."""


@pytest.mark.slow
def test_readers_of_a_file_that_ends_early_raise_storage_error(tmp_path: Path) -> None:
    """Samplers, loaders, pinned graphs and NumPy; the same as before once the file is whole again."""
    done = subprocess.run([sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("case ")]
    assert [line for line in results if not line.endswith(": ok")] == []
    assert len(results) >= CASES


FOREIGN = """
import faulthandler, mmap, os, sys, tempfile
order, guarded = sys.argv[1:]
if order == "before":
    faulthandler.enable()
from gids import _core
own, foreign = tempfile.TemporaryFile(), tempfile.TemporaryFile()
for file in own, foreign:
    file.truncate(8192)
mapped, _ = _core.map_file(own.fileno(), 8192, "own")
if order == "after":
    faulthandler.enable()
foreign_map = mmap.mmap(foreign.fileno(), 8192, prot=mmap.PROT_READ)
for file in own, foreign:
    file.truncate(0)
try:
    with _core.MapGuard():
        bytes(mapped)
except OSError as error:
    print(error.errno, flush=True)
if guarded == "guarded":
    with _core.MapGuard():
        foreign_map[0]
elif guarded == "no guard":
    bytes(mapped)
else:
    os.kill(os.getpid(), 7)
print("lives")
"""


def test_other_bus_errors_go_to_the_handler_before() -> None:
    """faulthandler prints once and the process ends, whether it was enabled before gids or after it."""
    cases = [(order, how) for order in ("before", "after") for how in ("guarded", "no guard", "sent")]
    with ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", FOREIGN, *case], stdout=PIPE, stderr=PIPE, text=True
                )
            )
            for case in [*cases, ("never", "guarded")]
        ]
        for case, process in zip([*cases, ("never", "guarded")], processes, strict=True):
            printed, errors = process.communicate(timeout=100)
            assert process.returncode == -signal.SIGBUS, case
            assert printed.endswith("61\n"), case  # ENODATA, and nothing after it
            assert errors.count("Fatal Python error: Bus error") == (case[0] != "never"), case
