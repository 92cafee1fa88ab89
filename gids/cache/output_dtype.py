"""The dtype of output rows, and how a gather converts stored bytes. Called by both caches and the loader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core

if TYPE_CHECKING:
    from gids.store import Table

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that rows are converted between."""

_UNCHANGED: int = _core.VALUE_TYPES["unchanged"]


@dataclass(frozen=True)
class RowForm:
    """How a gather converts a row, in the numbers of native/include/gids/convert.h.

    stored_as, wanted_as: ValueTypes, both "unchanged" if the bytes are copied. values: number of values of a
    row. out_row_bytes: bytes of an output row. scales: float32[values] if there is a scale per column.
    """

    stored_as: int
    wanted_as: int
    values: int
    out_row_bytes: int
    scales: npt.NDArray[np.float32] | None = None


def row_form(table: Table, wanted: torch.dtype | None) -> RowForm:
    """The conversion of a table's rows to out_dtype_of(table, wanted)."""
    values, nbytes, out_dtype = (
        math.prod(table.shape),
        out_row_bytes(table, wanted),
        out_dtype_of(table, wanted),
    )
    if table.scale is None and out_dtype == table.dtype:
        return RowForm(_UNCHANGED, _UNCHANGED, values, nbytes)
    stored_as = _name_of(table.dtype) if table.scale is None else f"int8_by_{table.scale}"
    scales = table.column_scales() if table.scale == "column" else None
    types: dict[str, int] = _core.VALUE_TYPES
    return RowForm(types[stored_as], types[_name_of(out_dtype)], values, nbytes, scales)


def out_dtype_of(table: Table, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a table's output rows: wanted, for tables of a dtype in FLOATS."""
    return wanted if wanted is not None and table.dtype in FLOATS else table.dtype


def out_row_bytes(table: Table, wanted: torch.dtype | None) -> int:
    """Bytes of an output row."""
    return math.prod(table.shape) * out_dtype_of(table, wanted).itemsize


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_out_dtype(wanted: torch.dtype | None) -> None:
    """Raise ValueError for an output dtype that rows cannot be converted to."""
    if wanted is not None and wanted not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise ValueError(f"dtype must be one of {names}, or None for the stored dtype (got {wanted!r})")
