"""Mapped files that cannot be read: StorageError where gids reads them, and the process lives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import emulator
import pytest
from forks import Fork
from full_disk import fuse

from gids import _core
from gids.errors import StorageError

CASES = 68
"""Cases that the program has, at least: it must not end early without an error."""


def read_all(*arguments: Path) -> None:
    from mapped_program import main  # which imports PyG

    main(*arguments)


@pytest.mark.slow
def test_readers_of_a_file_that_ends_early_raise_storage_error(tmp_path: Path) -> None:
    """Samplers, loaders, pinned graphs and NumPy; the same as before once the file is whole again."""
    done = Fork(tmp_path / "fork", read_all, tmp_path, emulator.folder).done()
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("case ")]
    assert [line for line in results if not line.endswith(": ok")] == []
    assert len(results) >= CASES


def test_an_error_names_a_path_of_any_bytes(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff")
    file.write_bytes(bytes(8192))
    with open(file, "r+b") as opened:
        mapped, _ = _core.map_file(opened.fileno(), 8192, os.fspath(file))
        opened.truncate(0)
        with pytest.raises(StorageError) as caught, _core.MapGuard():
            bytes(mapped)
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(file))


def test_a_file_that_fuse_maps_privately_only(tmp_path: Path) -> None:
    """With FUSE's option direct_io."""
    (tmp_path / "file").write_bytes(b"abcd" * 1024)
    with fuse(tmp_path, "-o", "direct_io") as place:
        with open(place / "file", "rb") as file:
            mapped, _ = _core.map_file(file.fileno(), 4096, "file")
        assert bytes(mapped) == b"abcd" * 1024
        del mapped


FOREIGN = """
import faulthandler, mmap, os, signal, sys, tempfile
from gids import _core  # it sets its handler when it first maps a file

def run(order, how):
    if order == "before":
        faulthandler.enable()
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
    if how == "guarded":
        with _core.MapGuard():
            foreign_map[0]
    elif how == "no guard":
        bytes(mapped)
    else:
        os.kill(os.getpid(), signal.SIGBUS)
    print("lives", flush=True)

for case in sys.argv[1:]:
    if not (child := os.fork()):
        for number in (1, 2):
            os.dup2(os.open(f"{case} {number}", os.O_WRONLY | os.O_CREAT), number)
        run(*case.split(", "))
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_other_bus_errors_go_to_the_handler_before(tmp_path: Path) -> None:
    """faulthandler prints once and the process ends, whether it was enabled before gids or after it."""
    cases = [f"{order}, {how}" for order in ("before", "after") for how in ("guarded", "no guard", "sent")]
    cases.append("never, guarded")
    done = subprocess.run(
        [sys.executable, "-P", "-c", FOREIGN, *cases], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(int(signal.SIGBUS))] * len(cases), done.stderr
    for case in cases:
        printed, errors = [(tmp_path / f"{case} {number}").read_text() for number in (1, 2)]
        assert printed == "61\n", case  # ENODATA, and nothing after it
        assert errors.count("Fatal Python error: Bus error") == (not case.startswith("never")), case
