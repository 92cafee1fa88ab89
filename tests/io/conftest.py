"""Fixtures of the I/O tests: shards with known contents, and memory of any alignment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import URING

ENGINES = [URING, "threads", "mmap"]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of random bytes: whole pages, an odd end, a single byte, nothing."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(11)
    paths = []
    for i, size in enumerate([200 * 4096, 150 * 4096 + 1234, 1, 0]):
        paths.append(folder / f"shard-{i}.bin")
        rng.integers(0, 256, size, dtype=np.uint8).tofile(paths[-1])
    return paths


@pytest.fixture(scope="session")
def contents(shards: list[Path]) -> list[np.ndarray]:
    """The model: the bytes of each shard."""
    return [np.fromfile(path, dtype=np.uint8) for path in shards]


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory() -> Callable[..., np.ndarray]:
    """(rows, bytes, offset) -> uint8[rows, bytes] of 170s, `offset` bytes after a page boundary."""

    def make(rows: int, row_bytes: int, offset: int = 0) -> np.ndarray:
        raw = np.full(rows * row_bytes + 2 * 4096, 170, np.uint8)
        start = -raw.ctypes.data % 4096 + offset
        return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)

    return make
