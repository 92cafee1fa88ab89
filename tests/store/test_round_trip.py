"""Rows are read back bit for bit, from the right positions: all types, row sizes and shard counts."""

import math

import numpy as np
import pytest
import torch
from datasets import same_bits

from gids.store import FeatureStore, GeneratedRows, verify
from gids.store.dtypes import TABLE_DTYPES, byte_view
from gids.write import DatasetWriter

ROW_COUNT = 37
PAGE_BYTES = 512
# Bytes of a row: several per page with and without a rest, one per page, a little less, more, much more.
ROW_BYTES = (8, 120, 256, 504, 512, 520, 5000)


def random_rows(row_count, shape, dtype, seed):
    row_bytes = math.prod(shape) * dtype.itemsize
    values = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, values, (row_count + 1) * row_bytes, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(row_count + 1, *shape)[:row_count]


def model_row(table, row):
    """A row's bytes, found by the sentence of the format that describes them."""
    page, slot = divmod(row, table.rows_per_page)
    shard, offset = page % len(table.shard_paths), page // len(table.shard_paths) * table.page_bytes
    start = offset + slot * table.row_bytes
    return table.shard_paths[shard].read_bytes()[start : start + table.row_bytes]


@pytest.mark.parametrize(
    ("dtype", "shards"), [(dtype, 1 + number % 3) for number, dtype in enumerate(TABLE_DTYPES)]
)
def test_rows_of_every_size_are_read_back(tmp_path, dtype, shards):
    type_ = TABLE_DTYPES[dtype]
    rows = {n: random_rows(ROW_COUNT, (n // type_.itemsize,), type_, n + shards) for n in ROW_BYTES}
    with DatasetWriter(tmp_path / "a.gids", page_bytes=PAGE_BYTES, stripe=shards) as writer:
        for row_bytes, values in rows.items():
            writer.write_table("node", "n", f"k{row_bytes}", values)
    store = FeatureStore(tmp_path / "a.gids")
    ids = torch.randint(ROW_COUNT, (100,), generator=torch.Generator().manual_seed(shards))
    for row_bytes, values in rows.items():
        table = store.table(f"n.k{row_bytes}")
        assert (table.dtype, table.row_bytes, table.row_count) == (type_, row_bytes, ROW_COUNT)
        assert table.rows_per_page == max(1, PAGE_BYTES // row_bytes)
        assert table.page_bytes == max(PAGE_BYTES, -(-row_bytes // 512) * 512)
        assert np.array_equal(byte_view(table.read_rows(ids)), byte_view(values[ids]))
        assert same_bits(torch.cat([block for _, block in table.scan(10)]), values)
        assert all(model_row(table, r) == byte_view(values[r]).tobytes() for r in range(ROW_COUNT))
    assert list(verify(tmp_path / "a.gids")) == []


@pytest.mark.parametrize("row_count", [0, 1, 2, 1000])
def test_rows_of_every_shape_and_count_are_read_back(tmp_path, row_count):
    shapes = {"a": (), "b": (3,), "c": (2, 3), "d": (1, 2, 2)}
    values = {key: random_rows(row_count, shape, torch.int32, 1) for key, shape in shapes.items()}
    with DatasetWriter(tmp_path / "a.gids", stripe=3) as writer:
        for key, rows in values.items():
            writer.write_table("node", "n", key, rows)
    store = FeatureStore(tmp_path / "a.gids")
    for key, rows in values.items():
        assert store.table(key).shape == shapes[key]
        assert torch.equal(store.table(key).read_rows(range(row_count)), rows)


def test_long_row_gets_one_page_aligned_to_4096_or_to_smaller_pages(tmp_path):
    for page_bytes, expected in ((4096, 8192), (8192, 8192), (512, 5120), (1536, 5120)):
        path = tmp_path / f"{page_bytes}.gids"
        with DatasetWriter(path, page_bytes=page_bytes) as writer:
            writer.write_table("node", "n", "k", torch.zeros(3, 5000, dtype=torch.uint8))
        assert FeatureStore(path).table("k").page_bytes == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_table_of_many_blocks_is_read_back(tmp_path, workers):
    """1 MiB of memory makes blocks of few pages, written out of order by several threads."""
    values = random_rows(5003, (100,), torch.float32, 3)
    with DatasetWriter(tmp_path / "a.gids", workers=workers, memory_bytes=1 << 20, stripe=2) as writer:
        rows = GeneratedRows(
            values.shape, values.dtype, lambda at, out: out.copy_(values[at : at + len(out)])
        )
        writer.write_table("node", "n", "k", rows)
    store = FeatureStore(tmp_path / "a.gids")
    assert np.array_equal(byte_view(store.read_rows(range(5003))), byte_view(values))
    assert list(verify(tmp_path / "a.gids", workers=workers)) == []
