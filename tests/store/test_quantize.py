"""Tables in fewer bits: their bytes match the format, and errors are within the bound."""

import itertools
import re

import numpy as np
import pytest
import torch
from model import int8_with_a_scale

from gids import FormatError, StorageError
from gids.store import FeatureStore, GeneratedRows, verify
from gids.store.files import load_scales
from gids.store.manifest import ArrayEntry
from gids.store.rows import file_crc32c
from gids.write import DatasetWriter

ROW_COUNT = 37
NARROW = [(torch.float16, None), (torch.bfloat16, None), (torch.int8, "row"), (torch.int8, "column")]


def write(path, values, dtype, scale=None, **options):
    with DatasetWriter(path, **options) as writer:
        found = writer.write_table("node", "n", "k", values, dtype=dtype, scale=scale)
    return FeatureStore(path).table("k"), found


SHAPES = [(7,), (), (3, 2), (128,), (700,)]
SOURCES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_rows_equal_the_model(tmp_path, scale):
    told = {}
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512, stripe=2) as writer:
        for number, (shape, source) in enumerate(itertools.product(SHAPES, SOURCES)):
            values = torch.randn(ROW_COUNT, *shape, generator=torch.Generator().manual_seed(3)).to(source)
            values[5] = 0
            key = f"k{number}"
            told[key] = values, writer.write_table("node", "n", key, values, dtype=torch.int8, scale=scale)
    assert list(verify(tmp_path / "a.gids")) == []
    store = FeatureStore(tmp_path / "a.gids")
    for key, (values, (narrowing, tally)) in told.items():
        table, shape, width = store.table(key), values.shape[1:], values[0].numel()
        rows = values.to(torch.float32).numpy().reshape(ROW_COUNT, width)
        steps, scales = int8_with_a_scale(rows, scale)
        expected = torch.from_numpy(steps.astype(np.float32) * scales).view(ROW_COUNT, *shape)
        assert (table.dtype, table.stored_dtype) == (torch.float32, torch.int8)
        assert (table.scale, table.shape) == (scale, tuple(shape))
        assert table.row_bytes == (width if scale == "column" else -(-width // 4) * 4 + 4)
        assert torch.equal(table.read_rows(range(ROW_COUNT)), expected)
        assert torch.equal(torch.cat([rows for _, rows in table.scan(5)]), expected)
        raw = torch.cat([rows for _, rows in table.scan(5, stored=True)]).numpy()
        assert np.array_equal(raw[:, :width].view(np.int8), steps)
        if scale == "row":
            assert np.array_equal(raw[:, -4:].copy().view(np.float32), scales)
            assert not raw[:, width:-4].any()
            assert table.column_scales() is None
        else:
            assert np.array_equal(table.column_scales(), scales.reshape(-1))
        error = (expected.double() - values.double()).abs().max()
        assert error <= tally.error * (1 + 1e-6)
        assert tally.error <= narrowing.bound(tally.largest)


@pytest.mark.parametrize(("dtype", "scale"), NARROW)
def test_extreme_values_keep_the_bound(tmp_path, dtype, scale):
    most = 60000.0 if dtype == torch.float16 else 3.0e38
    magnitudes = torch.tensor([0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1e-3, 1.0, 127.0, 128.5, 254.9, most])
    sign = torch.tensor([1.0, -1.0])
    values = torch.cartesian_prod(magnitudes, sign).prod(1)
    if dtype == torch.int8:
        values = torch.cat([values, torch.tensor([torch.finfo(torch.float32).max])])
    shapes = (values.view(-1, 1), values.view(1, -1), torch.stack([values, values.flip(0)]))
    for number, rows in enumerate(shapes):
        table, (narrowing, tally) = write(tmp_path / f"{number}.gids", rows, dtype, scale)
        found = table.read_rows(range(len(rows)))
        assert torch.isfinite(found).all()
        error = (found.double() - rows.double()).abs()
        assert float(error.max()) <= narrowing.bound(float(rows.abs().max()))
        if rows.shape[1] == 1 and scale == "row":  # each value is 127 steps
            assert (error <= rows.double().abs() * 1e-6 + 1e-38).all()
        assert float(error.max()) == pytest.approx(tally.error, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "dtype", "scale", "message"),
    [
        ([[1.0, 2.0], [3.0, torch.nan]], torch.int8, "row", "'n.k': row 1, column 1 is nan, which int8"),
        ([[1.0, 2.0], [torch.inf, 4.0]], torch.int8, "column", "'n.k': row 1, column 0 is inf, which int8"),
        ([[[1.0, 2.0], [3.0, -torch.inf]]], torch.int8, "row", "row 0, column 1, 1 is -inf"),
        ([1.0, torch.nan], torch.int8, "row", "row 1 is nan"),
        ([[1.0, 65520.0]], torch.float16, None, "row 0, column 1: 65520.0 does not fit in torch.float16"),
        ([[1.0]], torch.float16, "row", "a scale is for floating values stored as int8, not for float32"),
        ([[1]], torch.int8, "row", "not for int64 stored as int8"),
        ([[1.0]], torch.int8, "page", "scale is 'page'; it must be 'row' or 'column'"),
    ],
)
def test_value_that_cannot_be_stored_is_reported_with_row_and_column(tmp_path, values, dtype, scale, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        write(tmp_path / "a.gids", torch.tensor(values), dtype, scale)
    assert list(tmp_path.iterdir()) == []


def test_a_double_beyond_float32_is_refused(tmp_path):
    for dtype, scale in ((torch.int8, "row"), (torch.int8, "column"), (torch.float32, None)):
        with pytest.raises(FormatError, match=r"row 0, column 0.* 1e\+300"):
            write(tmp_path / "a.gids", torch.tensor([[1e300]], dtype=torch.float64), dtype, scale)


def test_error_in_a_later_block_has_the_row_number_of_the_table(tmp_path):
    values = torch.zeros(300_000, 3)
    values[299_990, 2] = torch.nan
    for scale in ("row", "column"):
        with pytest.raises(FormatError, match="row 299990, column 2 is nan"):
            write(tmp_path / "a.gids", values, torch.int8, scale, memory_bytes=1 << 20)


@pytest.mark.parametrize(("dtype", "scale"), NARROW)
def test_table_of_many_blocks_equals_the_table_of_one_block(tmp_path, dtype, scale):
    values = torch.randn(20_003, 60, generator=torch.Generator().manual_seed(1)) * 3
    rows = GeneratedRows(values.shape, values.dtype, lambda at, out: out.copy_(values[at : at + len(out)]))
    options = {"workers": 3, "memory_bytes": 1 << 20, "stripe": 2}
    table, (_, tally) = write(tmp_path / "a.gids", rows, dtype, scale, **options)
    plain, (_, once) = write(tmp_path / "b.gids", values, dtype, scale)
    ids = range(len(values))
    assert torch.equal(table.read_rows(ids), plain.read_rows(ids))
    assert tally.to_json() == once.to_json()


def test_scales_of_columns_are_checked_when_they_are_used(tmp_path):
    path = tmp_path / "a.gids"
    with DatasetWriter(path) as writer:
        writer.write_table("node", "n", "column", torch.randn(9, 6), dtype=torch.int8, scale="column")
    file = path / "tables/n.column/scale.npy"
    good = file.read_bytes()
    for wrong, said in ((-1.0, "scale[2] is -1.0"), (np.nan, "scale[2] is nan"), (np.inf, "scale[2] is inf")):
        scales = np.load(path / "tables/n.column/scale.npy")
        scales[2] = wrong
        file.write_bytes(good[:-24] + scales.tobytes())
        with pytest.raises(StorageError, match="the checksum of this file is wrong"):
            FeatureStore(path).table("column").read_rows([0])
        with pytest.raises(FormatError, match=re.escape(said)):
            load_scales(file, ArrayEntry("scale.npy", "float32", (6,), file_crc32c(file)))
        assert any("CRC32C" in fault for fault in verify(path))
        assert any(said in fault for fault in verify(path))
        file.write_bytes(good)
    file.write_bytes(good[:-4])
    with pytest.raises(FormatError, match="is truncated"):
        FeatureStore(path)
