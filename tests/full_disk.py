"""Disks that are full: a small file system, and a scratch disk that fills up; file systems over others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gids.packs import ScratchFull


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A new file system of this size. Skips if mounting is not allowed."""
    place = Path(tempfile.mkdtemp())
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True
        ).returncode
    ):
        pytest.skip("cannot mount a small file system here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


@contextlib.contextmanager
def overlay(lower: Path, upper: Path) -> Iterator[Path]:
    """A new overlay of two directories, as a container has it. Skips if mounting is not allowed."""
    place = Path(tempfile.mkdtemp())
    folders = [upper / "changes", upper / "work"]
    for folder in folders:
        folder.mkdir()
    layers = f"lowerdir={lower},upperdir={folders[0]},workdir={folders[1]}"
    command = ["mount", "-t", "overlay", "-o", f"xino=off,redirect_dir=off,{layers}", "overlay", place]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount an overlay here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


@contextlib.contextmanager
def fuse(folder: Path, *options: str) -> Iterator[Path]:
    """A new FUSE file system of a folder. Skips without bindfs."""
    place = Path(tempfile.mkdtemp())
    command = ["bindfs", *options, folder, place]
    if shutil.which("bindfs") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no bindfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
        place.rmdir()


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
