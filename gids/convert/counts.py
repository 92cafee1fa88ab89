"""Checks numbers of nodes and edges that a source gives. Called by the readers."""

from __future__ import annotations

import math

import numpy as np
import torch

from gids.convert.damage import shown
from gids.convert.packed_rows import PackedRows
from gids.errors import FormatError
from gids.store.dtypes import is_whole
from gids.store.geometry import MAX_ROWS
from gids.store.rows import FileRows, Rows, read_range


def whole_number(value: object, what: str) -> int:
    """A number of nodes or edges, from an int or an array with one integer.

    Raises FormatError unless it is a whole number from 0 to MAX_ROWS.
    """
    found = value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and _has_one(value):
        found = value.reshape(()).item()
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= MAX_ROWS:
        raise FormatError(f"{what} is {shown(found)}; it must be a whole number from 0 to {MAX_ROWS}")
    return found


def numbers(rows: Rows, count: int, what: str) -> list[int]:
    """The whole numbers of an array, which must have `count` entries. Raises FormatError."""
    if math.prod(rows.shape) != count or not is_whole(rows.dtype):
        raise FormatError(
            f"{what} has shape {rows.shape} and type {str(rows.dtype).removeprefix('torch.')}; "
            f"it must be {'one whole number' if count == 1 else f'{count} whole numbers'}"
        )
    flat = rows.reshaped((count,)) if isinstance(rows, (FileRows, PackedRows)) else rows
    values = read_range(flat, 0, flat.shape[0]).reshape(-1).tolist()
    return [whole_number(value, what) for value in values]


def row_count(rows: Rows, what: str) -> int:
    """Number of rows of an array. Raises FormatError for a single number."""
    if not rows.shape:
        raise FormatError(f"{what} is a single number; its first dimension must be rows")
    return rows.shape[0]


def _has_one(value: torch.Tensor | np.ndarray | np.generic) -> bool:
    return math.prod(value.shape) == 1 and (not isinstance(value, torch.Tensor) or value.device.type == "cpu")
