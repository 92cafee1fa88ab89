"""Extents read into device memory: by pinned staging, by the faster of two readers, and their shared code."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gids.io.device.extents as module
from gids.cuda import Device
from gids.errors import StorageError
from gids.io import Engine, open_engine
from gids.io.device.extent_reader import ExtentReader, Extents, PinnedExtentReader
from gids.io.device.extents import FasterReader, open_extent_reader
from gids.io.device.kvikio_probe import KvikioProbe

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


@pytest.mark.parametrize(
    "row",
    [(9, 0, 1, 0), (0, -1, 1, 0), (0, 0, -1, 0), (0, 0, 1, 100), (0, 0, 101, 0), (0, 0, 1, -1)],
    ids=str,
)
def test_an_extent_that_does_not_fit_is_a_bug(
    device: Device, reader: PinnedExtentReader, row: tuple[int, int, int, int]
) -> None:
    with pytest.raises(AssertionError):
        read(reader, columns([(0, 0, 1, 0), row]), blank(device, 100))


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


class Paced(ExtentReader):
    """A reader that forwards to another one and advances a clock, or fails."""

    name = ""

    def __init__(self, name: str, reader: Any, seconds: float, clock: list[float], error: Any = None) -> None:
        self.name, self.reads, self.closed = name, 0, 0  # type: ignore[misc]
        self._reader, self._seconds, self._clock, self._error = reader, seconds, clock, error

    def read_checked(self, extents: Extents, out: torch.Tensor) -> None:
        if self._error:
            raise self._error
        self.reads += 1
        self._clock[0] += self._seconds
        self._reader.read_checked(extents, out)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("outcome", ["the first", "the second", "an error"])
def test_the_faster_of_two_readers_is_kept(
    device: Device,
    reader: PinnedExtentReader,
    contents: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    outcome: str,
) -> None:
    monkeypatch.setattr(module, "_TRIAL_BYTES", 4 * PAGE)
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    error = StorageError(errno.EIO, "cuFile fails", "shard", 0) if outcome == "an error" else None
    first = Paced("a", reader, 2.0 if outcome == "the second" else 1.0, clock)
    second = Paced("b", reader, 2.0 if outcome == "the first" else 1.0, clock, error)
    chooser = FasterReader(device, ["shard"] * 4, first, second)
    out, kept = blank(device, 40 * PAGE), "b" if outcome == "the second" else "a"
    assert chooser.name == "a or b, not yet measured"
    read(chooser, columns([(0, 0, PAGE, 0)]), out)
    assert (first.reads, second.reads) == (1, 0), "one page is too little to measure"
    with caplog.at_level(logging.INFO, "gids"):
        for size in (5, 9, 40):  # a trial is four pages: one, then two, then the last and the rest
            read(chooser, columns([(0, i * PAGE, PAGE, i * PAGE) for i in range(size)]), out)
    assert np.array_equal(out.cpu().numpy(), contents[0][: 40 * PAGE])
    assert chooser.name == kept
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"reading extents with {kept}: ")
    assert ("cuFile fails" in said) == (error is not None)
    chooser.close()
    assert (first.closed, second.closed) == (1, 1)


Open = Callable[..., ExtentReader]


@pytest.fixture
def open_reader(
    device: Device,
    engine: Engine,
    shards: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Open:
    """open_reader(probe, obstacle, files=4, **options): where kvikio's probe and why_no_gds() say this."""
    caplog.set_level(logging.INFO, "gids")
    monkeypatch.setattr(module, "_logged", set())

    def opened(probe: KvikioProbe, obstacle: str = "", files: int = 4, **options: Any) -> ExtentReader:
        monkeypatch.setattr(module.kvikio_probe, "why_no_gds", lambda: obstacle)
        monkeypatch.setattr(module.kvikio_probe, "probe_kvikio", lambda path, index: probe)
        return open_extent_reader(device, engine, shards[:files], **options)

    return opened


@pytest.mark.parametrize(("kind", "tried"), [("auto", False), ("auto", True), ("pinned", False)])
def test_without_gds_extents_go_through_pinned_memory(
    open_reader: Open, engine: Engine, caplog: pytest.LogCaptureFixture, kind: str, tried: bool
) -> None:
    probe = KvikioProbe("26.10.0", False, True, "nvidia-fs is not loaded")
    for _ in range(2):
        # A probe that says nothing must not be asked.
        opened = open_reader(*((probe, "") if tried else (None, probe.reason)), kind=kind)
        assert opened.name == f"{engine.name}+pinned"
        opened.close()
    said = [f"reading extents with {engine.name}+pinned: nvidia-fs is not loaded"]
    assert [r.getMessage() for r in caplog.records] == (said if kind == "auto" else [])


NONE = KvikioProbe(None, False, False, "kvikio is not installed")
BROKEN = KvikioProbe("26.10", False, False, "no driver")


@pytest.mark.parametrize(
    ("probe", "kind", "error", "message"),
    [
        (NONE, "kvikio", ImportError, "pip install kvikio-cu13"),
        (BROKEN, "kvikio", OSError, "kvikio 26.10 does not work here: no driver"),
        (NONE, "gds", ValueError, r"'auto', 'kvikio' or 'pinned' \(got 'gds'\)"),
    ],
)
def test_a_kind_that_is_not_there_is_an_error(
    open_reader: Open, probe: KvikioProbe, kind: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_reader(probe, kind=kind)


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


class NoKvikio:
    """A KvikioReader that may fail to open."""

    name = "kvikio (GDS)"

    def __init__(self, device: Device, paths: list[Path], *, gds: bool, small: PinnedExtentReader) -> None:
        assert gds
        self.close = small.close
        if len(paths) > 1:
            small.close()
            raise StorageError(errno.EIO, "kvikio cannot open it", paths[1])


def test_with_gds_both_readers_are_opened_and_a_refused_file_is_reported(
    open_reader: Open, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "KvikioReader", NoKvikio)
    probe, pinned = KvikioProbe("26.10.0", True, True, ""), f"{engine.name}+pinned"
    both = f"{pinned} or kvikio (GDS), not yet measured"
    for files, kind, name in ((1, "auto", both), (1, "kvikio", "kvikio (GDS)"), (4, "auto", pinned)):
        opened = open_reader(probe, files=files, kind=kind)
        assert opened.name == name
        opened.close()
    assert "kvikio cannot open it" in caplog.text
    with pytest.raises(StorageError, match="kvikio cannot open it"):
        open_reader(probe, kind="kvikio")
