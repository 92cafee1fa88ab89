"""SparseRows: the rows of a CSR matrix, made dense a range at a time. Called by the readers."""

from __future__ import annotations

import numpy as np
import torch

from gids.errors import FormatError
from gids.store.rows import Rows, read_range


class SparseRows:
    """Row r has data[indptr[r]:indptr[r + 1]] in columns indices[…], else 0; duplicates add up."""

    def __init__(self, data: Rows, indices: Rows, indptr: Rows, *, shape: tuple[int, int]) -> None:
        if indptr.shape != (shape[0] + 1,) or data.shape != indices.shape or len(data.shape) != 1:
            found = f"indptr {indptr.shape}, indices {indices.shape}, data {data.shape}"
            raise FormatError(f"a sparse matrix of shape {shape} has {found}")
        self._data, self._indices, self._indptr = data, indices, indptr
        self.shape = shape
        self.dtype: torch.dtype = data.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        bounds = read_range(self._indptr, start, start + len(out) + 1).to(torch.int64).numpy()
        lengths = np.diff(bounds)
        if bounds[0] < 0 or (lengths < 0).any() or bounds[-1] > self._data.shape[0]:
            raise FormatError(
                f"the sparse matrix's indptr is not one, between rows {start} and {start + len(out)}"
            )
        columns = read_range(self._indices, int(bounds[0]), int(bounds[-1])).to(torch.int64).numpy()
        if len(columns) and not 0 <= columns.min() <= columns.max() < self.shape[1]:
            raise FormatError(
                f"the sparse matrix has column {columns.max()}; it must be from 0 to {self.shape[1] - 1}"
            )
        places = np.repeat(np.arange(len(out)) * self.shape[1], lengths) + columns
        values = read_range(self._data, int(bounds[0]), int(bounds[-1]))
        out.zero_()
        np.add.at(out.numpy().reshape(-1), places, values.numpy())
