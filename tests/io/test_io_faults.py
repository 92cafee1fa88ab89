"""Errors of single reads: they belong to those reads, and the engine stays usable."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gids.io

Memory = Callable[..., np.ndarray]
PAGE = 4096
FILES = np.zeros(16, np.uint32)
OFFSETS = np.arange(16) * PAGE


@pytest.mark.parametrize("max_merge_bytes", [0, 131072])
def test_an_injected_error_is_returned_once_by_the_read_of_its_byte(
    shards: list[Path], contents: list[np.ndarray], kind: str, max_merge_bytes: int, memory: Memory
) -> None:
    with gids.io.open_engine(shards, kind, max_merge_bytes=max_merge_bytes) as engine:
        engine.inject_faults([(0, 5 * PAGE + 100, errno.EIO, 1), (1, 0, errno.EIO, 9)])
        out = memory(16, PAGE)
        errors = engine.read(FILES, OFFSETS, PAGE, out)
        assert errors.tolist() == [errno.EIO if i == 5 else 0 for i in range(16)]
        good = errors == 0
        assert np.array_equal(out[good], contents[0][: 16 * PAGE].reshape(16, PAGE)[good])
        assert engine.stats()["errors"] == 1
        assert not engine.read(FILES, OFFSETS, PAGE, memory(16, PAGE)).any()
        engine.inject_faults([(0, 0, errno.EIO, 1)])
        engine.inject_faults([])
        assert not engine.read(FILES, OFFSETS, PAGE, memory(16, PAGE)).any()


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_eagain_and_eintr_are_retried_up_to_a_bound(
    shards: list[Path], contents: list[np.ndarray], kind: str, error: int, memory: Memory
) -> None:
    with gids.io.open_engine(shards, kind) as engine:
        engine.inject_faults([(0, 0, error, 5)])
        out = memory(16, PAGE)
        assert not engine.read(FILES, OFFSETS, PAGE, out).any()
        assert np.array_equal(out.reshape(-1), contents[0][: 16 * PAGE])
        assert engine.stats()["retries"] == 5
        engine.inject_faults([(0, 0, error, 10**6)])
        errors = engine.read(FILES, OFFSETS, PAGE, memory(16, PAGE))
        assert errors.tolist() == [error] + [0] * 15


def test_a_device_error_is_returned(kind: str, memory: Memory) -> None:
    if kind == "mmap":
        pytest.skip("a failed page fault is a signal: the mmap engine cannot deliver it")
    with gids.io.open_engine(["/proc/self/mem"], kind, direct=False) as engine:  # EIO at address 0
        for _ in range(2):
            assert (engine.read(FILES, OFFSETS, PAGE, memory(16, PAGE)) == errno.EIO).all()
        held = np.arange(512, dtype=np.int64)
        out = memory(1, PAGE)
        errors = engine.read(FILES[:1], np.array([held.ctypes.data]), PAGE, out)
        assert errors.tolist() == [0]
        assert np.array_equal(out.view(np.int64)[0], held)


def test_reads_that_always_fail_are_tried_a_bounded_number_of_times(
    shards: list[Path], kind: str, memory: Memory
) -> None:
    with gids.io.open_engine(shards, kind, depth=1) as engine:
        engine.inject_faults([(0, i * PAGE, errno.EIO, 10**6) for i in range(16)])
        for _ in range(20):
            assert (engine.read(FILES, OFFSETS, PAGE, memory(16, PAGE)) == errno.EIO).all()
        stats = engine.stats()
        assert stats["requests"] <= 20 * (1 + 16), "merged, then each alone"
