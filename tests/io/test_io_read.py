"""Reads through every engine equal np.fromfile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gids.io

Memory = Callable[..., np.ndarray]
PAGE = 4096


def check(
    contents: list[np.ndarray],
    files: np.ndarray,
    offsets: np.ndarray,
    out: list[np.ndarray],
    errors: np.ndarray,
) -> None:
    for file, offset, row, error in zip(files, offsets, out, errors, strict=True):
        expected = contents[file][offset : offset + len(row)]
        if len(expected) < len(row):
            assert error == errno.ENODATA, (file, offset, len(row))
        else:
            assert error == 0, (file, offset, len(row))
            assert np.array_equal(row, expected), (file, offset, len(row))


@pytest.mark.parametrize(
    ("depth", "max_merge_bytes", "direct"), [(1, 131072, True), (4, 0, False), (256, 131072, True)]
)
def test_random_reads_equal_the_files(
    shards: list[Path],
    contents: list[np.ndarray],
    kind: str,
    depth: int,
    max_merge_bytes: int,
    direct: bool,
    memory: Memory,
) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    options = {"depth": depth, "max_merge_bytes": max_merge_bytes, "max_read_bytes": 40000}
    with gids.io.open_engine(shards, kind, direct=direct, **options) as engine:
        assert engine.name == kind
        assert engine.alignment == 1 or direct
        reads = 0
        for step in range(9):
            count = int(rng.integers(1, 150))
            files = rng.choice(4, count, p=[0.5, 0.4, 0.05, 0.05]).astype(np.uint32)
            if step % 3 == 0:  # pages, many of them neighbors or duplicates
                nbytes, shift = PAGE, 0
                offsets = rng.integers(0, 160, count) * PAGE
            elif step % 3 == 1:  # rows of any length at any offset
                nbytes, shift = int(rng.integers(1, 40001)), int(rng.integers(0, PAGE))
                offsets = rng.integers(0, 160 * PAGE, count)
            else:  # neighbors of less than a block
                nbytes, shift = int(rng.choice([64, 512, 1000])), int(rng.choice([0, 512, 4]))
                offsets = (rng.integers(0, 100) * PAGE + np.arange(count)) * nbytes % (160 * PAGE)
            out = memory(count, nbytes, shift)
            errors = engine.read(files, offsets, nbytes, out)
            check(contents, files, offsets, list(out), errors)
            lengths = rng.integers(1, nbytes + 1, count)
            ends = np.cumsum(lengths)
            packed = np.zeros(ends[-1], np.uint8)
            errors = engine.read_extents(files, offsets, lengths, packed, ends - lengths)
            check(contents, files, offsets, np.split(packed, ends[:-1]), errors)
            reads += 2 * count
        stats = engine.stats()
        assert stats["reads"] == reads
        assert stats["depth_max"] <= engine.depth <= depth


def test_reads_of_several_threads_do_not_mix(
    shards: list[Path], contents: list[np.ndarray], kind: str, memory: Memory
) -> None:
    with gids.io.open_engine(shards, kind, depth=8) as engine, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(3):
                files = rng.integers(0, 2, 60).astype(np.uint32)
                offsets = rng.integers(0, 140, 60) * PAGE
                out = memory(60, PAGE)
                check(contents, files, offsets, list(out), engine.read(files, offsets, PAGE, out))

        list(pool.map(work, range(4)))
        assert engine.stats()["reads"] == 4 * 3 * 60


def test_neighboring_pages_are_merged_and_single_pages_are_not(
    shards: list[Path], kind: str, memory: Memory
) -> None:
    files = np.zeros(64, np.uint32)
    for merge_bytes, requests in [(0, 64), (8 * PAGE, 8), (131072, 2)]:
        with gids.io.open_engine(shards, kind, max_merge_bytes=merge_bytes) as engine:
            engine.read(files, np.arange(64)[::-1] * PAGE, PAGE, memory(64, PAGE))
            assert engine.stats()["requests"] == requests
            engine.read(files, np.arange(64) * 2 * PAGE, PAGE, memory(64, PAGE))
            assert engine.stats()["requests"] == requests + 64
            assert engine.stats()["bytes_read"] == engine.stats()["bytes_asked"] == 128 * PAGE


def test_unaligned_neighbors_read_each_block_once(shards: list[Path], memory: Memory) -> None:
    with gids.io.open_engine(shards, "threads", max_read_bytes=PAGE) as engine:
        if engine.alignment == 1:
            pytest.skip("buffered reads have no blocks")
        count = PAGE // 64
        errors = engine.read(np.zeros(count, np.uint32), np.arange(count) * 64, 64, memory(count, 64, 64))
        assert not errors.any()
        assert engine.stats()["bytes_read"] == PAGE


@pytest.mark.parametrize("kind", ["threads", "mmap"])
def test_a_file_truncated_after_opening_ends_early(tmp_path: Path, kind: str, memory: Memory) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * PAGE))
    with gids.io.open_engine([path], kind) as engine:
        with open(path, "r+b") as f:
            f.truncate(2 * PAGE)
        errors = engine.read(np.zeros(8, np.uint32), np.arange(8) * PAGE, PAGE, memory(8, PAGE))
        assert errors.tolist() == [0, 0] + [errno.ENODATA] * 6


def test_threads_share_the_depth(shards: list[Path], kind: str, memory: Memory) -> None:
    with gids.io.open_engine(shards, kind, depth=7, threads=3, max_merge_bytes=0) as engine:
        assert engine.depth == (7 if kind == "uring" else 3)
        errors = engine.read(
            np.zeros(200, np.uint32),
            np.random.default_rng(0).permutation(200) * PAGE,
            PAGE,
            memory(200, PAGE),
        )
        assert not errors.any()
        assert 1 <= engine.stats()["depth_max"] <= engine.depth


# --- errors of single reads: they belong to those reads ---


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


def test_eagain_and_eintr_are_retried_up_to_a_bound(
    shards: list[Path], contents: list[np.ndarray], kind: str, memory: Memory
) -> None:
    for error in (errno.EAGAIN, errno.EINTR):
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
