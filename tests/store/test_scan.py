"""Table.scan: every row once, in blocks of any size and order, from any number of shards."""

import os

import numpy as np
import pytest
import torch

from gids import FeatureStore, StorageError
from gids.write import DatasetWriter

ROWS = 1000


def write(path, values, *, shards=1, page_bytes=512):
    with DatasetWriter(path, page_bytes=page_bytes, stripe=shards) as writer:
        writer.write_table("node", "a", "feat", values)
    return FeatureStore(path).table("feat")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("width", [1, 50, 128, 300])
@pytest.mark.parametrize("rows_per_block", [1, 7, 256, 5000])
def test_blocks_are_the_rows_in_order(tmp_path, shards, width, rows_per_block):
    count = 40 if rows_per_block == 1 else ROWS
    values = torch.arange(count * width, dtype=torch.float32).reshape(count, width)
    table = write(tmp_path / "a.gids", values, shards=shards)
    starts, blocks = zip(*table.scan(rows_per_block), strict=True)
    assert list(starts) == list(range(0, count, rows_per_block))
    assert torch.equal(torch.cat(blocks), values)


def test_blocks_in_any_order(tmp_path):
    values = torch.arange(ROWS)
    table = write(tmp_path / "a.gids", values, shards=2)
    order = np.random.default_rng(3).permutation(10).tolist()
    found = list(table.scan(100, order=order))
    assert [start for start, _ in found] == [100 * n for n in order]
    assert all(torch.equal(block, values[start : start + 100]) for start, block in found)
    assert list(table.scan(100, order=[])) == []


def test_an_empty_table_has_no_blocks(tmp_path):
    assert list(write(tmp_path / "a.gids", torch.empty(0, 4)).scan(10)) == []


def test_a_scan_may_be_left_early(tmp_path):
    table = write(tmp_path / "a.gids", torch.arange(ROWS))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        blocks = table.scan(10)
        next(blocks)
        blocks.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_invalid_block_is_refused(tmp_path):
    table = write(tmp_path / "a.gids", torch.arange(ROWS))
    with pytest.raises(ValueError, match="rows_per_block is 0"):
        table.scan(0)
    with pytest.raises(IndexError, match=r"block 10 is out of range for 'a.feat' in a.gids \(10 blocks\)"):
        table.scan(100, order=[3, 10])


def test_a_truncated_shard_is_a_storage_error(tmp_path):
    table = write(tmp_path / "a.gids", torch.arange(ROWS))
    blocks = table.scan(100)
    assert next(blocks)[0] == 0
    os.truncate(table.shard_paths[0], 1024)
    with pytest.raises(StorageError, match="the file ended early"):
        list(blocks)
    with pytest.raises(StorageError, match="truncated after the dataset was opened"):
        next(table.scan(100))
