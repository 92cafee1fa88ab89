"""The element types that tables and arrays may have, by the names that manifests use.

Called by every file of this folder. A table's type is a torch.dtype, because NumPy has no bfloat16; an
array's (graph, labels, splits) is a NumPy type. All are little-endian, as are the machines supported.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from gids.errors import FormatError

if sys.byteorder != "little":
    raise ImportError("gids reads and writes little-endian data in place; this processor is big-endian")

TABLE_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
ARRAY_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint32", "bool")
}


def table_dtype(name: str) -> torch.dtype:
    """The torch type called ``name``. Raises FormatError, with the names there are, for any other."""
    try:
        return TABLE_DTYPES[name]
    except KeyError:
        raise FormatError(f"unknown dtype {name!r} (known: {', '.join(TABLE_DTYPES)})") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a torch type. Raises FormatError for a type that tables cannot have."""
    for name, known in TABLE_DTYPES.items():
        if known == dtype:
            return name
    found = str(dtype).removeprefix("torch.")
    raise FormatError(f"tables cannot hold {found}: cast it (--dtype) to one of {', '.join(TABLE_DTYPES)}")


def torch_dtype_of(dtype: np.dtype[np.generic]) -> torch.dtype | None:
    """The torch type with the values of a NumPy type of numbers or bool, or None (text, complex, …).

    int16, uint16, uint32 and uint64 can be read, but tables cannot hold them.
    """
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        return None
    found = getattr(torch, dtype.newbyteorder("=").name)
    assert isinstance(found, torch.dtype)
    return found


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a type is of whole numbers, which ids are."""
    return not dtype.is_floating_point and dtype != torch.bool


def make_bools_proper(values: torch.Tensor) -> torch.Tensor:
    """The same tensor; where it is bool, bytes that are neither 0 nor 1 have become 1.

    Called for all that comes from files: what torch and NumPy make of a bool of another byte is undefined.
    """
    if values.dtype == torch.bool:
        values.view(torch.uint8).clamp_(max=1)
    return values


def byte_view(rows: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor of any dtype as uint8[bytes], without a copy."""
    if rows.numel() == 0:
        return np.empty(0, np.uint8)
    return rows.reshape(-1).view(torch.uint8).numpy()
