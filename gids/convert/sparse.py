"""SparseRows: the rows of a CSR matrix, made dense range by range. Called by the readers."""

from __future__ import annotations

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.array_checks import as_int64
from gids.store.rows import Rows, read_range

_PIECE_ENTRIES = 1 << 20


class SparseRows:
    """Row r has data[indptr[r]:indptr[r + 1]] in columns indices[…], and 0 elsewhere. Duplicates add up."""

    def __init__(self, data: Rows, indices: Rows, indptr: Rows, *, shape: tuple[int, int]) -> None:
        if indptr.shape != (shape[0] + 1,) or data.shape != indices.shape or len(data.shape) != 1:
            found = f"indptr {indptr.shape}, indices {indices.shape}, data {data.shape}"
            raise FormatError(f"a sparse matrix of shape {shape} has arrays that do not fit: {found}")
        if indices.dtype.is_floating_point or indptr.dtype.is_floating_point:
            raise FormatError(
                f"a sparse matrix of shape {shape} has floating indices or indptr; they must be whole"
            )
        self._data, self._indices, self._indptr = data, indices, indptr
        self.shape = shape
        self.dtype: torch.dtype = data.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        bounds = as_int64(read_range(self._indptr, start, start + len(out) + 1), "indptr", start).numpy()
        if bounds[0] < 0 or (np.diff(bounds) < 0).any() or bounds[-1] > self._data.shape[0]:
            raise FormatError(
                f"the sparse matrix's indptr is invalid between rows {start} and {start + len(out)}"
            )
        out.zero_()
        flat = out.numpy().reshape(-1)
        for first in range(int(bounds[0]), int(bounds[-1]), _PIECE_ENTRIES):  # a row may list a column twice
            last = min(first + _PIECE_ENTRIES, int(bounds[-1]))
            columns = as_int64(read_range(self._indices, first, last), "indices", first).numpy()
            wrong = columns[(columns < 0) | (columns >= self.shape[1])]
            if len(wrong):
                raise FormatError(
                    f"the sparse matrix has column {wrong[0]}; it must be from 0 to {self.shape[1] - 1}"
                )
            rows = np.searchsorted(bounds, np.arange(first, last), side="right") - 1
            np.add.at(flat, rows * self.shape[1] + columns, read_range(self._data, first, last).numpy())
