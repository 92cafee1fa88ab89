"""The element types of tables and arrays, by their names in manifests. Called by every file of this folder.

A table has a torch.dtype, because NumPy has no bfloat16. Arrays (graph, labels, splits) have NumPy types. All
are little-endian.

int8 with a scale: encode and decode such rows. See docs/internals/format.md. Called by the writer, Table and
`gids verify`. A value x with scale s is stored as the integer round(x / s), -127 to 127, and read as that
times s, a float32. The scale of a row (or column) is its largest |x| / 127. Native code decodes when it
gathers, with the same bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.geometry import Geometry, align_up, table_page_bytes

if sys.byteorder != "little":
    raise ImportError("gids needs a little-endian processor; this one is big-endian")

TABLE_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    # Before 2.3, torch has no tensors of these types.
    **{name: getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)},
}
_STORED = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint32", "bool")
ARRAY_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name).newbyteorder("<") for name in (*_STORED, "uint16")
}
"""uint16 is only for the owners of nodes in a part of a dataset."""
UINT64: torch.dtype | None = TABLE_DTYPES.get("uint64")


def table_dtype(name: str) -> torch.dtype:
    """The torch type with this name. Raises FormatError, which lists the known names."""
    try:
        return TABLE_DTYPES[name]
    except KeyError:
        raise FormatError(f"unknown dtype {name!r} (known: {', '.join(TABLE_DTYPES)})") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch type in manifests. Raises FormatError for a type that tables cannot have."""
    for name, known in TABLE_DTYPES.items():
        if known == dtype:
            return name
    name = str(dtype).removeprefix("torch.")
    raise FormatError(f"tables cannot hold {name}: cast it (--dtype) to one of {', '.join(TABLE_DTYPES)}")


def torch_dtype_of(dtype: np.dtype[np.generic]) -> torch.dtype | None:
    """The torch type that equals a NumPy type of numbers or bool, or None (text, complex, …)."""
    return TABLE_DTYPES.get(dtype.newbyteorder("=").name)


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a type is an integer type."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def equal_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether values are the same numbers: bool, in the shape of a and b, which are on the CPU.

    Takes any two types, also unsigned ones, which torch cannot compare with others. Rounds nothing and keeps
    signs. NaN differs from itself.
    """
    if a.is_complex() or b.is_complex():
        return a.to(torch.complex128) == b.to(torch.complex128)
    if b.dtype.is_floating_point:
        a, b = b, a
    if b.dtype.is_floating_point:
        return a.to(torch.float64) == b.to(torch.float64)
    whole = b.to(torch.int64)  # uint64 of 2^63 and above becomes negative
    if not a.dtype.is_floating_point:
        equal = a.to(torch.int64) == whole
        return equal & (whole >= 0) if (a.dtype == UINT64) != (b.dtype == UINT64) else equal
    kind = np.uint64 if b.dtype == UINT64 else np.int64
    wide, limits = a.to(torch.float64).numpy(), np.iinfo(kind)
    is_inside = (wide >= float(limits.min)) & (wide < float(limits.max))  # float64 rounds max up by 1
    integers = np.where(is_inside, wide, 0).astype(kind)
    equal = is_inside & (integers == whole.numpy().view(kind)) & (integers.astype(np.float64) == wide)
    return torch.from_numpy(np.asarray(equal))


def make_bools_proper(values: torch.Tensor) -> torch.Tensor:
    """Return the same tensor; if it is bool, set bytes other than 0 and 1 to 1, in place.

    Called for all data from files, because torch and NumPy do not define a bool with another byte.
    """
    if values.dtype == torch.bool:
        values.view(torch.uint8).clamp_(max=1)
    return values


def byte_view(rows: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor of any dtype as uint8[bytes], without a copy."""
    if rows.numel() == 0:
        return np.empty(0, np.uint8)
    return rows.reshape(-1).view(torch.uint8).numpy()


SCALES = ("row", "column")
STEPS = 127
SCALE_BYTES = 4
RELATIVE_BOUND = 0.5 + 2.0**-15
"""The largest error, as a multiple of the scale: one half, and the rounding of float32."""

_LEAST = torch.finfo(torch.float32).tiny  # a smaller scale loses precision or becomes 0


def check_scale(scale: object, where: str) -> str:
    """Return ``scale`` if it is one of SCALES; else raise FormatError."""
    if scale not in SCALES:
        raise FormatError(f"{where} is {scale!r}; it must be {' or '.join(map(repr, SCALES))}")
    return str(scale)


def stored_row_bytes(shape: tuple[int, ...], itemsize: int, scale: str | None) -> int:
    """Bytes of a row. With a scale per row they are a multiple of 4, and the scale is at the end."""
    values = math.prod(shape)
    if scale == "row" and values:
        return align_up(values, SCALE_BYTES) + SCALE_BYTES
    return values * itemsize


def stored_geometry(
    shape: Sequence[int], itemsize: int, scale: str | None, *, page_bytes: int, shard_count: int
) -> Geometry:
    """The layout of values[shape]. Raises FormatError."""
    row_bytes = stored_row_bytes(tuple(shape[1:]), itemsize, scale)
    return Geometry(shape[0], row_bytes, table_page_bytes(row_bytes, page_bytes), shard_count)


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """The scale for each largest magnitude: 0 for 0, else 1/127 of it. float32, same shape."""
    scales = maxima / STEPS
    scales = torch.where((maxima > 0) & (scales < _LEAST), torch.full_like(scales, _LEAST), scales)
    # 127 times the scale of the largest float32 may round to infinity.
    return torch.where(torch.isinf(scales * STEPS), torch.nextafter(scales, torch.zeros(())), scales)


def pack_rows(values: torch.Tensor, columns: torch.Tensor | None, out: np.ndarray) -> torch.Tensor:
    """Encode finite float32[n, width] to rows uint8[n, row_bytes]; return the decoded values.

    columns: float32[width], the scales of the columns; None: one scale per row.
    """
    width = values.shape[1]
    scales = scales_of(values.abs().amax(1, keepdim=True)) if columns is None else columns
    steps = torch.where(scales > 0, values / scales, torch.zeros(()))
    steps = steps.round_().clamp_(-STEPS, STEPS).to(torch.int8)
    out[:, :width] = steps.numpy().view(np.uint8)
    if columns is None:
        out[:, width:-SCALE_BYTES] = 0
        out[:, -SCALE_BYTES:] = scales.numpy().view(np.uint8)
    return steps.to(torch.float32).mul_(scales)


def unpack_rows(
    data: np.ndarray, shape: tuple[int, ...], scale: str, columns: np.ndarray | None
) -> torch.Tensor:
    """Decode rows uint8[n, row_bytes] to float32[n, *shape]."""
    steps, scales = split_rows(data, shape, scale)
    if scales is None:
        assert columns is not None
        scales = torch.from_numpy(columns).view(shape)
    return steps.to(torch.float32).mul_(scales)


def split_rows(
    data: np.ndarray, shape: tuple[int, ...], scale: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(int8[n, *shape], the float32 scales of the rows, or None if columns have the scales)."""
    width = math.prod(shape)
    steps = np.ascontiguousarray(data[:, :width]).view(np.int8).reshape(len(data), *shape)
    if scale == "column":
        return torch.from_numpy(steps), None
    scales = np.ascontiguousarray(data[:, -SCALE_BYTES:]).view(np.float32)
    return torch.from_numpy(steps), torch.from_numpy(scales).view(-1, *[1] * len(shape))


def check_scales(scales: np.ndarray, where: str) -> None:
    """Raise FormatError if a scale in float32[n] is negative or not finite."""
    wrong = np.flatnonzero(~(np.isfinite(scales) & (scales >= 0)))
    if len(wrong):
        raise FormatError(
            f"{where}: scale[{wrong[0]}] is {scales[wrong[0]]}; it must be finite and 0 or more"
        )
