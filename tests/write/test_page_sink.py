"""PageSink writes the pages that a model has."""

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

DATA = np.random.default_rng(0).integers(0, 256, 2 * 4096, np.uint8)


@pytest.mark.parametrize(("start", "size", "offset"), [(0, 4096, 4096), (1, 4096, 0), (0, 1000, 7)])
def test_direct_writes_fall_back_to_the_page_cache(tmp_path, start, size, offset):
    memory = aligned_zeros(2, 4096).reshape(-1)
    memory[:] = DATA
    with open(tmp_path / "f", "wb") as file:
        write_directly(file.fileno())
        write_exactly(file.fileno(), memory[start : start + size], offset)
    assert (tmp_path / "f").read_bytes()[offset:] == DATA[start : start + size].tobytes()
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


@pytest.mark.parametrize(("row_bytes", "shards"), [(512, 3), (128, 1), (100, 3), (7, 1)])
def test_ranges_of_pages_and_rows_that_are_appended_make_the_pages(tmp_path, row_bytes, shards):
    options = {"page_bytes": 512, "shards": [f"{shard}" for shard in range(shards)], "checksums": "sums"}
    entry = table_entry("node", "n", "k", (ROWS, row_bytes), torch.uint8, **options)
    layout = entry.geometry
    for seed in range(4):
        rows = RNG.integers(1, 256, (ROWS, row_bytes), np.uint8)
        bounds = np.unique(np.append(RNG.integers(0, ROWS, 9), [0, ROWS]))
        with PageSink(tmp_path, entry, direct=seed % 2 == 0) as sink:
            if seed < 2:  # in any order
                bounds = np.unique([*(bounds // layout.rows_per_page * layout.rows_per_page), ROWS])
                for i in RNG.permutation(len(bounds) - 1):
                    sink.write(int(bounds[i]), rows[bounds[i] : bounds[i + 1]])
            else:
                for start, stop in pairwise(bounds):
                    sink.append(rows[start:stop])
            assert sink.finish() == file_crc32c(tmp_path / "sums")
        pages = model(layout, rows)
        for shard in range(shards):
            assert (tmp_path / f"{shard}").read_bytes() == pages[shard::shards].tobytes()
        assert (tmp_path / "sums").read_bytes() == _core.crc32c(pages).tobytes()
