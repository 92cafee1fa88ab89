"""A file on a device with 4096-byte blocks: smaller reads read each enclosing block once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gids.io

BLOCK, ROW, ROWS = 4096, 512, 700


def call(*command: object) -> str:
    return subprocess.run(
        [str(c) for c in command], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def coarse_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file on an ext4 file system in a loop device with blocks of 4096 B. Needs root."""
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("no losetup and mkfs.ext4")
    folder = tmp_path_factory.mktemp("coarse")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    with image.open("r+b") as f:
        f.truncate(32 << 20)
    try:
        device = call("losetup", "--find", "--show", "--sector-size", BLOCK, image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr.strip()}")
    try:
        call("mkfs.ext4", "-q", "-b", BLOCK, device)
        try:
            call("mount", device, mount)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no mount: {error.stderr.strip()}")
        try:
            file = mount / "shard.bin"
            np.random.default_rng(5).integers(0, 256, ROWS * ROW, dtype=np.uint8).tofile(file)
            yield file
        finally:
            call("umount", mount)
    finally:
        call("losetup", "--detach", device)


def test_rows_smaller_than_a_block_read_the_enclosing_blocks(
    coarse_file: Path, kind: str, memory: Callable[..., np.ndarray]
) -> None:
    rows = np.fromfile(coarse_file, dtype=np.uint8).reshape(ROWS, ROW)
    files = np.zeros(ROWS, np.uint32)
    with gids.io.open_engine([coarse_file], kind, max_read_bytes=ROW) as engine:
        assert engine.alignment == (1 if kind == "mmap" else BLOCK)
        out = memory(ROWS, ROW, ROW)
        assert not engine.read(files, np.arange(ROWS) * ROW, ROW, out).any()
        assert np.array_equal(out, rows)
        if kind != "mmap":
            assert engine.stats()["bytes_read"] == -(-ROWS * ROW // BLOCK) * BLOCK
        some = np.random.default_rng(6).integers(0, ROWS, 300)
        out = memory(300, ROW)
        assert not engine.read(files[:300], some * ROW, ROW, out).any()
        assert np.array_equal(out, rows[some])
