"""Arrays in compressed zip members: read in any order, from any thread, in bounded memory; damage raises."""

import random
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gids import FormatError
from gids.convert import stream_rows
from gids.convert.array_files import open_npz
from gids.store.rows import read_range


@pytest.fixture
def small_pieces(monkeypatch):
    """Makes few rows need several pieces and restarts."""
    monkeypatch.setattr(stream_rows, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(stream_rows, "KEPT_BYTES", 5000)


def packed(path, **arrays):
    np.savez_compressed(path, **arrays)
    return {name: found.rows for name, found in open_npz(path, path.parent).items()}


def test_ranges_are_read_in_any_order(tmp_path, small_pieces):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    values = np.random.default_rng(seed).standard_normal((3000, 11), np.float32)
    edges = np.arange(6000).reshape(2, 3000)
    rows = packed(tmp_path / "x.npz", values=values, edges=edges)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz"]
    for _ in range(200):
        start = rng.randrange(3000)
        stop = rng.randrange(start, min(3000, start + 400) + 1)
        assert np.array_equal(read_range(rows["values"], start, stop), values[start:stop])
        assert np.array_equal(read_range(rows["edges"].row(1), start, stop), edges[1, start:stop])


def test_many_threads_read_nearly_in_order(tmp_path, small_pieces):
    values = np.arange(200_000, dtype=np.int32).reshape(-1, 4)
    rows = packed(tmp_path / "x.npz", x=values)["x"]
    starts = range(0, len(values), 100)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: read_range(rows, start, start + 100), starts))
    assert np.array_equal(torch.cat(found), values)


def test_fortran_order_is_unpacked(tmp_path):
    values = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    assert np.array_equal(read_range(packed(tmp_path / "x.npz", x=values)["x"], 1, 3), values[1:3])


def rezip(path, change):
    """Write the archive again with changed bytes in its member."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read("x.npy")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", change(data))


def test_member_shorter_than_its_header_raises(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(1000.0))
    rezip(tmp_path / "x.npz", lambda data: data[:-100])
    with pytest.raises(FormatError, match=r"its member x\.npy has \d+ bytes"):
        open_npz(tmp_path / "x.npz", tmp_path)


def test_wrong_checksum_raises(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(1000.0))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        crc = archive.getinfo("x.npy").CRC.to_bytes(4, "little")
    while (at := data.find(crc)) >= 0:
        data[at] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    rows = open_npz(tmp_path / "x.npz", tmp_path)["x"].rows
    assert rows is not None
    with pytest.raises(FormatError, match=r"Bad CRC-32 for file 'x\.npy'"):
        read_range(rows, 0, 1000)
