"""PageSink writes the pages that a model has."""

import fcntl
import mmap
import os
from itertools import pairwise

import numpy as np
import pytest
import torch

from gids import _core
from gids.store.manifest import table_entry
from gids.store.rows import file_crc32c
from gids.write.files import aligned_zeros, write_directly, write_exactly
from gids.write.page_sink import PageSink

DATA = np.random.default_rng(0).integers(0, 256, 16 * 4096, np.uint8)


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def written(fd):
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_aligned_pages_are_written_without_a_copy(fd):
    pages = aligned_zeros(16, 4096)
    assert not pages.any()
    pages.reshape(-1)[:] = DATA
    assert pages.ctypes.data % mmap.PAGESIZE == 0
    write_directly(fd)
    before = is_direct(fd)
    write_exactly(fd, pages.reshape(-1), 8192)
    assert is_direct(fd) == before
    write_exactly(fd, np.empty(0, np.uint8), 0)
    assert written(fd)[8192:] == DATA.tobytes()


@pytest.mark.parametrize(("start", "size", "offset"), [(1, 4096, 0), (0, 1000, 0), (0, 4096, 7)])
def test_write_falls_back_to_the_page_cache(fd, start, size, offset):
    memory = aligned_zeros(2, 4096).reshape(-1)
    memory[:] = DATA[:8192]
    write_directly(fd)
    write_exactly(fd, memory[start : start + size], offset)
    assert written(fd)[offset:] == DATA[start : start + size].tobytes()


def test_other_errors_are_raised(tmp_path):
    (tmp_path / "f").touch()
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    write_directly(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_exactly(fd, DATA, 0)
    os.close(fd)


ROWS = 203
RNG = np.random.default_rng(1)


def model(layout, rows):
    """The pages of a table, by the words of the format."""
    pages = np.zeros((layout.page_count, layout.page_bytes), np.uint8)
    for row, data in enumerate(rows):
        page, slot = divmod(row, layout.rows_per_page)
        pages[page, slot * layout.row_bytes : (slot + 1) * layout.row_bytes] = data
    return pages


def check(entry, folder, rows):
    layout = entry.geometry
    pages = model(layout, rows)
    for shard in range(layout.shard_count):
        assert (folder / f"{shard}").read_bytes() == pages[shard :: layout.shard_count].tobytes()
    assert (folder / "sums").read_bytes() == _core.crc32c(pages).tobytes()


def table(row_bytes, shards):
    options = {"page_bytes": 512, "shards": [f"{shard}" for shard in range(shards)], "checksums": "sums"}
    return table_entry("node", "n", "k", (ROWS, row_bytes), torch.uint8, **options)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("row_bytes", [512, 128, 100, 7])
def test_ranges_of_pages_and_rows_that_are_appended_make_the_pages(tmp_path, row_bytes, shards):
    entry = table(row_bytes, shards)
    per_page = entry.geometry.rows_per_page
    for seed in range(6):
        rows = RNG.integers(1, 256, (ROWS, row_bytes), np.uint8)
        bounds = np.unique(np.append(RNG.integers(0, ROWS, 9), [0, ROWS]))
        with PageSink(tmp_path, entry, direct=seed % 2 == 0) as sink:
            if seed < 3:  # in any order
                bounds = np.unique([*(bounds // per_page * per_page), ROWS])
                for i in RNG.permutation(len(bounds) - 1):
                    sink.write(int(bounds[i]), rows[bounds[i] : bounds[i + 1]])
            else:
                for start, stop in pairwise(bounds):
                    sink.append(rows[start:stop])
            assert sink.finish() == file_crc32c(tmp_path / "sums")
        check(entry, tmp_path, rows)
