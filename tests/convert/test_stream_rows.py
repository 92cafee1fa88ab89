"""Arrays in compressed zip members: read in any order, from any thread, in bounded memory; damage raises."""

import random
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gids import FormatError
from gids.convert.array_files import open_npz
from gids.convert.stream_rows import StreamRows
from gids.store.rows import read_range


def packed(path, **arrays):
    np.savez_compressed(path, **arrays)
    return {name: found.rows for name, found in open_npz(path, path.parent).items()}


def test_ranges_are_read_in_any_order_in_bounded_memory():
    """100 pieces of 1 MiB, of which at most 64 MiB are kept; what is not kept is read again."""
    rows, opened = 1 << 10, []

    def pieces(first):
        return (torch.full((rows, 128), float(n), dtype=torch.float64) for n in range(first, 100))

    def open_at(row):
        opened.append(row)
        return row // rows * rows, pieces(row // rows)

    stream = StreamRows((100 * rows, 128), torch.float64, open_at)
    rng = random.Random(0)
    for _ in range(30):
        start = rng.randrange(100 * rows)
        stop = min(100 * rows, start + rng.randrange(3 * rows))
        expected = torch.arange(start, stop).div(rows, rounding_mode="floor").double()
        assert torch.equal(read_range(stream, start, stop), expected[:, None].expand(-1, 128))
    assert len(opened) > 1


def test_many_threads_read_nearly_in_order(tmp_path):
    values, edges = np.arange(800_000, dtype=np.int32).reshape(-1, 4), np.arange(6000).reshape(2, 3000)
    rows = packed(tmp_path / "x.npz", x=values, edges=edges)
    starts = range(0, len(values), 1000)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda start: read_range(rows["x"], start, start + 1000), starts))
    assert np.array_equal(torch.cat(found), values)
    assert np.array_equal(read_range(rows["edges"].row(1), 7, 2000), edges[1, 7:2000])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz"]


def test_fortran_order_is_unpacked(tmp_path):
    values = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    assert np.array_equal(read_range(packed(tmp_path / "x.npz", x=values)["x"], 1, 3), values[1:3])


def test_member_shorter_than_its_header_raises(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(1000.0))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", (tmp_path / "x.npy").read_bytes()[:-100])
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
