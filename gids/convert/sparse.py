"""Sparse matrices in CSR form: SparseRows, and files of scipy.sparse.save_npz. Called by the readers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from gids.convert.array_files import SourceArray, read_npy_header
from gids.convert.source import described, numbers
from gids.convert.untrusted import open_zip
from gids.errors import FormatError
from gids.store.array_checks import as_int64
from gids.store.rows import Rows, read_range

_PIECE_ENTRIES = 1 << 20
_PARTS = ("data", "indices", "indptr", "shape")
_FORM_BYTES = 64  # limit for the member with the name of the form, such as "csr"


class SparseRows:
    """Row r has data[indptr[r]:indptr[r + 1]] in columns indices[…], and 0 elsewhere. Duplicates add up."""

    def __init__(self, data: Rows, indices: Rows, indptr: Rows, *, shape: tuple[int, int]) -> None:
        are_whole = not (indices.dtype.is_floating_point or indptr.dtype.is_floating_point)
        fits = indptr.shape == (shape[0] + 1,) and data.shape == indices.shape and len(data.shape) == 1
        if not fits or not are_whole:
            parts = f"data {described(data)}, indices {described(indices)}, indptr {described(indptr)}"
            raise FormatError(f"a sparse matrix of shape {shape} has arrays that do not fit: {parts}")
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


def is_scipy_sparse(names: Container[str]) -> bool:
    """Whether the arrays of a .npz file are a SciPy sparse matrix."""
    return "format" in names and "shape" in names and "data" in names


def as_sparse_parts(path: Path, arrays: Mapping[str, SourceArray], role: str = "") -> dict[str, SourceArray]:
    """The arrays of a CSR matrix as adj_data, … or attr_data, …. Raises FormatError for another form.

    role: "adj" or "attr" (default: "adj" for a square matrix).
    """
    form = _form_of(path)
    if form != "csr" or any(name not in arrays for name in _PARTS):
        raise FormatError(
            f"{path} is a SciPy sparse matrix in {form} form; write it as CSR: "
            f"save_npz({path.name!r}, matrix.tocsr())"
        )
    shape = arrays["shape"].rows
    if shape is None:
        raise FormatError(f"{path} is a SciPy sparse matrix, but its shape is not two whole numbers")
    if not role:
        role = "adj" if len(set(numbers(shape, 2, f"the shape of {path}"))) == 1 else "attr"
    return {f"{role}_{name}": arrays[name] for name in _PARTS}


def _form_of(path: Path) -> str:
    """The content of the member `format`, such as "csr"."""
    with open_zip(path, "is not a SciPy sparse matrix") as archive, archive.open("format.npy") as file:
        shape, _, dtype = read_npy_header(cast(BinaryIO, file), path)
        if shape or dtype.kind not in "SU" or not 0 < dtype.itemsize <= _FORM_BYTES:
            raise FormatError(f"{path} is not a SciPy sparse matrix: its format is {dtype}{list(shape)}")
        form = np.frombuffer(file.read(dtype.itemsize), dtype)[0]
    return form.decode("ascii", "replace") if isinstance(form, bytes) else str(form)
