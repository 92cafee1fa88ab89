"""Extents read into device memory through pinned staging, and what all readers of extents share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gids.cuda import Device
from gids.errors import StorageError
from gids.io import Engine, open_engine
from gids.io.device.extents import ExtentReader, Extents, PinnedExtentReader

PAGE = 4096


@pytest.fixture
def engine(shards: list[Path]) -> Iterator[Engine]:
    with open_engine(shards, max_read_bytes=64 << 10) as opened:
        yield opened


@pytest.fixture
def reader(device: Device, engine: Engine, shards: list[Path]) -> Iterator[PinnedExtentReader]:
    """Staging of two halves of 32 KiB, so that most reads need many rounds."""
    opened = PinnedExtentReader(device, engine, shards, staging_bytes=64 << 10)
    yield opened
    opened.close()
    opened.close()


def columns(rows: list[tuple[int, int, int, int]]) -> Extents:
    files, offsets, lengths, out_offsets = zip(*rows, strict=True) if rows else ((), (), (), ())
    numbers = (np.array(column, np.int64) for column in (offsets, lengths, out_offsets))
    return Extents(np.array(files, np.uint32), *numbers)


def random_extents(rng: np.random.Generator, sizes: list[int], unit: int, count: int) -> tuple[Extents, int]:
    """Extents in random order, some of them neighbors in file and out; and the bytes of out."""
    rows, out_offset = [], 0
    while len(rows) < count:
        file = int(rng.integers(2))
        offset = int(rng.integers(sizes[file] // unit)) * unit
        for _ in range(int(rng.integers(1, 5))):
            length = min(int(rng.integers(0, 4)) * unit, sizes[file] - offset)
            rows.append((file, offset, length, out_offset))
            offset, out_offset = offset + length, out_offset + length
        out_offset += unit * int(rng.integers(0, 2))
    order = rng.permutation(len(rows))
    return columns([rows[i] for i in order]), out_offset


def read(reader: ExtentReader, extents: Extents, out: torch.Tensor) -> None:
    reader.read(extents.files, extents.offsets, extents.lengths, out, extents.out_offsets)


def expected(extents: Extents, contents: list[np.ndarray], out_bytes: int) -> np.ndarray:
    """The model: out of 170s, with the extents copied in."""
    out = np.full(out_bytes, 170, np.uint8)
    for file, offset, length, out_offset in zip(*(column.tolist() for column in extents), strict=True):
        out[out_offset : out_offset + length] = contents[file][offset : offset + length]
    return out


def blank(device: Device, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 170, dtype=torch.uint8, device=device.torch_device)


@pytest.mark.parametrize("unit", [PAGE, 512, 1, 977, 20_000])
def test_extents_equal_the_files(
    device: Device, reader: PinnedExtentReader, contents: list[np.ndarray], unit: int
) -> None:
    for seed in range(3):
        print(f"seed {seed}, unit {unit}")
        sizes = [len(c) for c in contents]
        extents, size = random_extents(np.random.default_rng(seed), sizes, unit, 120)
        out = blank(device, size)
        read(reader, extents, out)
        np.testing.assert_array_equal(out.cpu().numpy(), expected(extents, contents, size))


def test_an_extent_longer_than_staging_and_engine_is_read(
    device: Device, reader: PinnedExtentReader, contents: list[np.ndarray]
) -> None:
    whole = columns([(1, 0, len(contents[1]), 0)])
    out = blank(device, len(contents[1]))
    read(reader, whole, out)
    assert np.array_equal(out.cpu().numpy(), contents[1])
    read(reader, columns([]), out)
    read(reader, columns([(2, 0, 1, 5)]), out)
    assert out[5] == contents[2][0]


def test_neighbors_reach_the_disk_as_one_request(device: Device, engine: Engine, shards: list[Path]) -> None:
    reader = PinnedExtentReader(device, engine, shards)
    count = 64
    order = np.random.default_rng(5).permutation(count)
    rows = [(0, int(i) * PAGE, PAGE, int(i) * PAGE) for i in order]
    read(reader, columns(rows), blank(device, count * PAGE))
    reader.close()
    assert engine.stats()["reads"] == count
    assert engine.stats()["requests"] <= count // 16


def test_read_waits_for_work_on_the_current_stream(
    device: Device, reader: PinnedExtentReader, contents: list[np.ndarray]
) -> None:
    stream = device.new_stream()
    with device.use(stream):
        out = blank(device, 150 * PAGE)
        read(reader, columns([(0, 0, 150 * PAGE, 0)]), out)
    assert np.array_equal(out.cpu().numpy(), contents[0][: 150 * PAGE])


def test_an_error_names_shard_offset_and_errno_and_the_reader_stays_usable(
    device: Device, engine: Engine, reader: PinnedExtentReader, shards: list[Path], contents: list[np.ndarray]
) -> None:
    extents = columns([(0, i * PAGE, PAGE, i * PAGE) for i in range(40)])
    out = blank(device, 40 * PAGE)
    engine.inject_faults([(0, 30 * PAGE + 7, errno.EIO, 100), (0, 31 * PAGE, errno.EIO, 100)])
    with pytest.raises(StorageError, match="cannot read 4096 bytes: Input/output error") as caught:
        read(reader, extents, out)
    assert (caught.value.errno, caught.value.filename, caught.value.offset) == (
        errno.EIO,
        str(shards[0]),
        30 * PAGE,
    )
    engine.inject_faults([])
    read(reader, extents, out)
    assert np.array_equal(out.cpu().numpy(), contents[0][: 40 * PAGE])


def test_a_truncated_shard_ends_before_the_extent(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(8 * PAGE))
    with open_engine([path]) as engine:
        reader = PinnedExtentReader(device, engine, [path], staging_bytes=64 << 10)
        os.truncate(path, 5 * PAGE + 100)
        with pytest.raises(StorageError, match="the file ends before it") as caught:
            read(reader, columns([(0, 0, 8 * PAGE, 0)]), blank(device, 8 * PAGE))
        reader.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(path))


def test_a_closed_reader_does_not_read(device: Device, reader: PinnedExtentReader) -> None:
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        read(reader, columns([(0, 0, 1, 0)]), blank(device, 1))


def test_merging_and_splitting_keep_the_bytes() -> None:
    for seed in range(20):
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        contents = [rng.integers(0, 256, 5000, dtype=np.uint8) for _ in range(2)]
        extents, size = random_extents(rng, [5000, 5000], 7, 60)
        extents = extents.take(extents.lengths > 0)
        runs = extents.merged()
        pieces = runs.split(10)
        assert len(runs.files) < len(extents.files)
        assert pieces.lengths.min() > 0
        assert pieces.lengths.max() <= 10
        for other in (runs, pieces):
            assert np.array_equal(expected(other, contents, size), expected(extents, contents, size))
        again = pieces.merged()
        assert all(np.array_equal(a, b) for a, b in zip(again, runs, strict=True))


def test_staging_that_fails_to_be_mapped_leaves_nothing(
    device: Device, engine: Engine, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, nbytes: int, **options: Any) -> None:
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(device, "map_host", refuse)
    with pytest.raises(RuntimeError, match="the driver refuses"):
        PinnedExtentReader(device, engine, shards)
    with pytest.raises(ValueError, match="at least 8192"):
        PinnedExtentReader(device, engine, shards, staging_bytes=4096)
