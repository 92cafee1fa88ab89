"""Disks that are full: a small file system, and a scratch disk that fills up; file systems over others."""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gids.packs import ScratchFull


@contextlib.contextmanager
def mounted(command: list[str | Path], what: str) -> Iterator[Path]:
    """A new directory, the last argument of this command, which mounts there. Skips if it fails."""
    place = Path(tempfile.mkdtemp())
    if subprocess.run([*command, place], capture_output=True).returncode:
        place.rmdir()
        pytest.skip(f"cannot mount {what} here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


def small_disk(size: str) -> contextlib.AbstractContextManager[Path]:
    """A new file system of this size. Skips if mounting is not allowed."""
    return mounted(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs"], "a small file system")


def overlay(lower: Path, upper: Path) -> contextlib.AbstractContextManager[Path]:
    """A new overlay of two directories, as a container has it. Skips if mounting is not allowed."""
    folders = [upper / "changes", upper / "work"]
    for folder in folders:
        folder.mkdir()
    options = f"xino=off,redirect_dir=off,lowerdir={lower},upperdir={folders[0]},workdir={folders[1]}"
    return mounted(["mount", "-t", "overlay", "-o", options, "overlay"], "an overlay")


def fuse(folder: Path, *options: str) -> contextlib.AbstractContextManager[Path]:
    """A new FUSE file system of a folder. Skips without bindfs."""
    if shutil.which("bindfs") is None:
        pytest.skip("no bindfs here")
    return mounted(["bindfs", *options, folder], "a FUSE file system")


def fail_at(monkeypatch: pytest.MonkeyPatch, of: type, name: str, turn: int) -> None:
    """The method finds the disk full, from the turn-th call on."""
    original: Callable[..., Any] = getattr(of, name)
    calls = 0

    def method(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= turn:
            raise ScratchFull(errno.ENOSPC, "no room", "somewhere")
        return original(self, *args, **options)

    monkeypatch.setattr(of, name, method)
