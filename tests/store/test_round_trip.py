"""Rows are read back bit for bit, from the right positions: all types, row sizes and shapes."""

import math

import numpy as np
import torch
from datasets import same_bits

from gids.store import FeatureStore, verify
from gids.store.dtypes import TABLE_DTYPES, byte_view
from gids.write import DatasetWriter

ROW_COUNT = 37
PAGE_BYTES = 512
# Bytes of a row: several per page with and without a rest, one per page, a little more, much more.
ROW_BYTES = (120, 512, 520, 5000)
SHAPES = ((), (3,), (1, 2, 2))


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


def test_rows_of_every_type_size_and_shape_are_read_back(tmp_path):
    rows = {}
    for name, dtype in TABLE_DTYPES.items():
        sizes = [(row_bytes // dtype.itemsize,) for row_bytes in ROW_BYTES]
        for shape in (*sizes, *SHAPES) if name == "int32" else sizes:
            for row_count in (ROW_COUNT, 1, 0) if shape == (3,) else (ROW_COUNT,):
                key = f"{name}{list(shape)}{row_count}"
                rows[key] = random_rows(row_count, shape, dtype, len(rows))
    with DatasetWriter(tmp_path / "a.gids", page_bytes=PAGE_BYTES, stripe=2) as writer:
        for key, values in rows.items():
            writer.write_table("node", f"of {len(values)}", key, values)
    store = FeatureStore(tmp_path / "a.gids")
    for key, values in rows.items():
        table, count = store.table(key), len(values)
        row_bytes = math.prod(table.shape) * values.element_size()
        assert (table.dtype, table.shape, table.row_count) == (values.dtype, values.shape[1:], count)
        assert table.rows_per_page == max(1, PAGE_BYTES // row_bytes)
        assert table.page_bytes == max(PAGE_BYTES, -(-row_bytes // 512) * 512)
        ids = torch.randint(count, (100,)) if count else torch.empty(0, dtype=torch.int64)
        assert same_bits(table.read_rows(ids), values[ids])
        assert same_bits(torch.cat([torch.empty_like(values[:0]), *(b for _, b in table.scan(10))]), values)
        assert all(model_row(table, row) == byte_view(values[row]).tobytes() for row in range(0, count, 5))
    assert list(verify(tmp_path / "a.gids")) == []


def test_long_row_gets_one_page_aligned_to_4096_or_to_smaller_pages(tmp_path):
    for page_bytes, expected in ((4096, 8192), (8192, 8192), (512, 5120), (1536, 5120)):
        path = tmp_path / f"{page_bytes}.gids"
        with DatasetWriter(path, page_bytes=page_bytes) as writer:
            writer.write_table("node", "n", "k", torch.zeros(3, 5000, dtype=torch.uint8))
        assert FeatureStore(path).table("k").page_bytes == expected
