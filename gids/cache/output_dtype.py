"""How rows are handed out: the dtype, and what gathering does to the stored bytes. Called by both caches and
the loader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from gids.store import Table

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that rows are converted between, in the order of gids::ValueType from 1 on."""

_UNCHANGED = 0
_SCALED = {"row": 4, "column": 5}


@dataclass(frozen=True)
class RowForm:
    """What gathering does to a row: the numbers of native/include/gids/convert.h.

    stored_as, wanted_as: ValueTypes, both 0 when the bytes stay as they are. values: of a row.
    out_row_bytes: of a row in the output. scales: float32[values] of rows with a scale per column.
    """

    stored_as: int
    wanted_as: int
    values: int
    out_row_bytes: int
    scales: npt.NDArray[np.float32] | None = None


def row_form(table: Table, wanted: torch.dtype | None) -> RowForm:
    """How a table's rows become rows of out_dtype_of(table, wanted)."""
    values = math.prod(table.shape)
    out_dtype = out_dtype_of(table, wanted)
    if table.scale is None and out_dtype == table.dtype:
        return RowForm(_UNCHANGED, _UNCHANGED, values, table.row_bytes)
    stored_as = FLOATS.index(table.dtype) + 1 if table.scale is None else _SCALED[table.scale]
    scales = table.column_scales() if table.scale == "column" else None
    return RowForm(stored_as, FLOATS.index(out_dtype) + 1, values, values * out_dtype.itemsize, scales)


def out_dtype_of(table: Table, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a table's rows in the output: floating ones become the wanted one."""
    return wanted if wanted is not None and table.dtype in FLOATS else table.dtype


def out_row_bytes(table: Table, wanted: torch.dtype | None) -> int:
    """Bytes of a row in the output."""
    return math.prod(table.shape) * out_dtype_of(table, wanted).itemsize


def check_out_dtype(wanted: torch.dtype | None) -> None:
    """ValueError for an output dtype that rows cannot be converted to."""
    if wanted is not None and wanted not in FLOATS:
        names = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise ValueError(
            f"dtype={wanted}: rows can be converted to {names}; None leaves them as they are stored"
        )
