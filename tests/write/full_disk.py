"""A small file system, which fills up."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


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
