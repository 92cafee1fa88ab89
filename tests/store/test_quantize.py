"""Tables in fewer bits: their bytes match the format, and errors are within the bound."""

import re

import numpy as np
import pytest
import torch
from datasets import int8_with_a_scale

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


SHAPES = {(7,): torch.float32, (): torch.float16, (3, 2): torch.bfloat16, (700,): torch.float64}


@pytest.mark.parametrize("scale", ["row", "column"])
def test_int8_rows_equal_the_model(tmp_path, scale):
    told = {}
    with DatasetWriter(tmp_path / "a.gids", page_bytes=512, stripe=2) as writer:
        for number, (shape, source) in enumerate(SHAPES.items()):
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
        assert torch.equal(table.read_rows(range(ROW_COUNT)), expected)
        assert torch.equal(torch.cat([rows for _, rows in table.scan(5)]), expected)
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
    for number, rows in enumerate((values.view(-1, 1), torch.stack([values, values.flip(0)]))):
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
        ([[1.0, 65520.0]], torch.float16, None, "row 0, column 1: 65520.0 does not fit in torch.float16"),
        ([[1.0]], torch.float16, "row", "a scale is for floating values stored as int8, not for float32"),
        ([[1.0]], torch.int8, "page", "scale is 'page'; it must be 'row' or 'column'"),
    ],
)
def test_value_that_cannot_be_stored_is_reported_with_row_and_column(tmp_path, values, dtype, scale, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        write(tmp_path / "a.gids", torch.tensor(values), dtype, scale)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", ["row", "column"])
def test_a_table_of_many_blocks_equals_the_table_of_one_block(tmp_path, scale):
    values = torch.randn(20_003, 60, generator=torch.Generator().manual_seed(1)) * 3
    rows = GeneratedRows(values.shape, values.dtype, lambda at, out: out.copy_(values[at : at + len(out)]))
    options = {"workers": 3, "memory_bytes": 1 << 20, "stripe": 2}
    table, (_, tally) = write(tmp_path / "a.gids", rows, torch.int8, scale, **options)
    plain, (_, once) = write(tmp_path / "b.gids", values, torch.int8, scale)
    ids = range(len(values))
    assert torch.equal(table.read_rows(ids), plain.read_rows(ids))
    assert tally.to_json() == once.to_json()
    values[20_000, 2] = torch.nan
    with pytest.raises(FormatError, match="row 20000, column 2 is nan"):
        write(tmp_path / "c.gids", values, torch.int8, scale, memory_bytes=1 << 20)


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
        faults = "\n".join(verify(path))
        assert "CRC32C" in faults
        assert said in faults
        file.write_bytes(good)
