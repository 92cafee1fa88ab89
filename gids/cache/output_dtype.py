"""The dtype of output rows, how a gather converts stored bytes, and host memory for outputs.

Called by both caches, packs and the loader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cuda.pinned import pinned_bytes
from gids.store.dtypes import make_bools_proper
from gids.store.geometry import align_up

if TYPE_CHECKING:
    from gids.store import Table

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that rows are converted between."""

_UNCHANGED: int = _core.VALUE_TYPES["unchanged"]
_EXACT = _UNCHANGED, _core.VALUE_TYPES["float32"]


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

    @property
    def narrows(self) -> bool:
        """Whether a finite value may become infinite."""
        return self.wanted_as not in _EXACT


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


def converted(rows: torch.Tensor, table: Table, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a table in this dtype, as a gather converts them. Raises OverflowError."""
    values = rows.to(dtype)
    if values.dtype != rows.dtype and bool((values.isinf() & rows.isfinite()).any()):
        raise overflow_error(table, dtype)
    return values


def overflow_error(table: Table, dtype: torch.dtype) -> OverflowError:
    """For rows with a finite value that became infinite."""
    return OverflowError(
        f"table {table.name!r} has a value that does not fit in {dtype}, whose largest value is "
        f"{torch.finfo(dtype).max:g}: load rows as torch.float32, or in their stored dtype"
    )


def out_row_bytes(table: Table, wanted: torch.dtype | None) -> int:
    """Bytes of an output row."""
    return math.prod(table.shape) * out_dtype_of(table, wanted).itemsize


def output_bytes(nbytes: int, *, pinned: bool) -> int:
    """Host memory of an output of so many bytes."""
    return pinned_bytes(nbytes) if pinned else max(4096, align_up(nbytes, 4096))


class Outputs:
    """Host memory of features. keep_bytes: that is kept for later ones. rows: that an output has room for, by
    table, so that outputs of smaller minibatches are reused for larger ones. pinned: the memory is torch's
    pinned memory, which torch keeps for later ones."""

    def __init__(
        self,
        tables: Sequence[Table],
        dtype: torch.dtype | None,
        *,
        keep_bytes: int = 0,
        rows: Mapping[str, int] | None = None,
        pinned: bool = False,
    ) -> None:
        self.forms = {t.name: row_form(t, dtype) for t in tables}
        self._pool = _core.BufferPool.create(keep_bytes)
        self._keep_bytes, self._pinned = keep_bytes, pinned
        self.dtypes = {t.name: out_dtype_of(t, dtype) for t in tables}
        self._rows = rows or {}

    @property
    def peak_bytes(self) -> int:
        """The most memory so far; of pinned memory, which torch counts, what may be used."""
        return self._keep_bytes if self._pinned else int(self._pool.peak_bytes)

    def take(self, table: Table, count: int) -> torch.Tensor:
        """Memory for so many rows: uint8[count, bytes of a row]."""
        row_bytes = self.forms[table.name].out_row_bytes
        nbytes, room = count * row_bytes, self._rows.get(table.name, 0) * row_bytes
        if self._pinned:
            size = room if nbytes <= room < 2 * nbytes else nbytes  # so that most have the same size
            flat = torch.empty(size, dtype=torch.uint8, pin_memory=True)[:nbytes]
        else:
            flat = torch.from_numpy(self._pool.take(nbytes, room))
        return flat.view(count, row_bytes)

    def tensor(self, table: Table, out: torch.Tensor) -> torch.Tensor:
        """What take() returned, as features, once it is filled."""
        flat = out.view(-1).view(self.dtypes[table.name])
        return make_bools_proper(flat.view(len(out), *table.shape))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_out_dtype(wanted: torch.dtype | None) -> None:
    """Raise ValueError for an output dtype that rows cannot be converted to."""
    if wanted is not None and wanted not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise ValueError(f"dtype must be one of {names}, or None for the stored dtype (got {wanted!r})")
