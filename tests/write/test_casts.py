"""Whole numbers are stored as the same numbers in another type, or refused: no sign and no range is lost."""

import numpy as np
import pytest
import torch
from datasets import needs_unsigned

from gids import FeatureStore, FormatError
from gids.store.dtypes import TABLE_DTYPES, equal_values
from gids.write import DatasetWriter, edge_list
from gids.write.narrow import cast_exactly

WHOLE = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def limits(dtype):
    return (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def numbers(dtype):
    """The numbers of a type next to powers of 2, at which other types end."""
    low, high = limits(dtype)
    powers = [sign << bits for bits in (0, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64) for sign in (1, -1)]
    near = {0, low, high, 65504, 65520, *(p + d for p in powers for d in (-1, 0, 1))}
    return sorted(v for v in near if low <= v <= high)


def holds(dtype, value):
    """Whether a type has this whole number."""
    if dtype == "bfloat16":
        return abs(value) // max(1, value & -value) < 256
    if dtype.startswith("float"):
        with np.errstate(over="ignore"):
            rounded = np.dtype(dtype).type(value)
        return bool(np.isfinite(rounded)) and int(rounded) == value
    low, high = limits(dtype)
    return low <= value <= high


@needs_unsigned
@pytest.mark.parametrize("source", WHOLE)
def test_every_whole_number_is_kept_or_refused(source):
    for target, dtype in TABLE_DTYPES.items():
        for value in numbers(source):
            out = torch.empty(3, dtype=dtype)
            values = torch.from_numpy(np.array([0, value, value], source))
            if holds(target, value):
                cast_exactly(values, out)
                assert out.tolist() == [0, value, value]
            else:
                with pytest.raises(FormatError, match=f"^{value} is not exact in torch.{target}; "):
                    cast_exactly(values, out)


@needs_unsigned
def test_values_of_any_two_types_are_compared_exactly():
    columns = {dtype: numbers(dtype) for dtype in WHOLE}
    columns["float64"] = [0.5, -1.0, 2.0**53, 2.0**63, 2.0**64, -(2.0**63), 255.0, np.inf, -np.inf, np.nan]
    columns["float16"] = [0.0, 1.0, 65504.0, -np.inf]
    made = [torch.from_numpy(np.array(values, dtype)) for dtype, values in columns.items()]
    for a in made:
        for b in made:
            equal = equal_values(a.repeat_interleave(len(b)), b.repeat(len(a)))
            assert equal.tolist() == [x == y for x in a.tolist() for y in b.tolist()]


LOSSES = [
    (np.array([[200], [255]], np.uint8), "int8", "200 is not exact"),
    (np.array([[1 << 31], [0]], np.uint32), "int32", "2147483648 is not exact in .*; keep torch.uint32"),
    (np.array([[np.iinfo(np.int64).max], [0]]), "float64", "9223372036854775807 is not exact"),
    (torch.tensor([[0.0], [1e6]]), "float16", r"row 1, column 0: 1000000\.0 does not fit in torch\.float16"),
    (np.array([[1e300], [0]]), "float32", r"row 0, column 0: 1e\+300 does not fit.*: use float64$"),
    (np.array([[3.4e38], [0]]), "bfloat16", r"row 0, column 0: 3\.4e\+38 does not fit.*: use float32 or "),
    (torch.tensor([[1.5], [0]]), "int8", "casting torch.float32 features to torch.int8 would cut"),
    (torch.tensor([[1.0], [0]]), "bool", "casting torch.float32 features to torch.bool would round them"),
    (torch.tensor([[1 + 2j], [0]]), "float32", "tables cannot hold torch.complex64: store"),
]


@needs_unsigned
@pytest.mark.parametrize(("values", "dtype", "said"), LOSSES)
def test_both_writers_refuse_another_sign_or_range(tmp_path, values, dtype, said):
    wanted = TABLE_DTYPES[dtype]
    with (
        pytest.raises(FormatError, match=f"table 'n.k': {said}"),
        DatasetWriter(tmp_path / "a.gids") as writer,
    ):
        writer.write_table("node", "n", "k", values, dtype=wanted)
    with pytest.raises(FormatError, match=said), DatasetWriter(tmp_path / "b.gids") as writer:
        with writer.open_table("node", "n", "new", (2, 1), wanted) as table:
            table.write(values)
    assert list(tmp_path.iterdir()) == []


@needs_unsigned
def test_unsigned_times_are_stored(tmp_path):
    times = np.array([3, (1 << 32) - 1, 0], np.uint32)
    edges = edge_list(np.array([0, 1, 2]), np.array([0, 0, 0]), num_src=3, num_dst=3)
    with DatasetWriter(tmp_path / "a.gids") as writer:
        writer.write_times("n", times)
        writer.write_edges(("n", "to", "n"), edges, times=times)
    store = FeatureStore(tmp_path / "a.gids")
    assert np.array_equal(store.node_times("n"), times)
    assert store.graph().indices.tolist() == [2, 0, 1]
