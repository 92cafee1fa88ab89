"""Recognises files of scipy.sparse.save_npz and renames their arrays. Called by array_files and readers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

import numpy as np

from gids.convert.counts import numbers
from gids.convert.npy_header import read_npy_header
from gids.convert.zip_file import open_zip
from gids.errors import FormatError
from gids.store.rows import Rows

_PARTS = ("data", "indices", "indptr", "shape")
_FORM_BYTES = 64  # limit for the member with the name of the form, such as "csr"


class _HasRows(Protocol):
    @property
    def rows(self) -> Rows | None: ...


T = TypeVar("T", bound=_HasRows)


def is_scipy_sparse(names: Container[str]) -> bool:
    """Whether the arrays of a .npz file are a SciPy sparse matrix."""
    return "format" in names and "shape" in names and "data" in names


def as_sparse_parts(path: Path, found: Mapping[str, T], role: str = "") -> dict[str, T]:
    """The arrays of a CSR matrix as adj_data, … or attr_data, …. Raises FormatError for another form.

    role: "adj" or "attr" (default: "adj" for a square matrix).
    """
    form = _form_of(path)
    if form != "csr" or any(name not in found for name in _PARTS):
        raise FormatError(
            f"{path} is a SciPy sparse matrix in {form} form; write it as CSR: "
            f"save_npz({path.name!r}, matrix.tocsr())"
        )
    shape = found["shape"].rows
    if shape is None:
        raise FormatError(f"{path} is a SciPy sparse matrix, but its shape is not two whole numbers")
    if not role:
        role = "adj" if len(set(numbers(shape, 2, f"the shape of {path}"))) == 1 else "attr"
    return {f"{role}_{name}": found[name] for name in _PARTS}


def _form_of(path: Path) -> str:
    """The content of the member `format`, such as "csr"."""
    with open_zip(path, "is not a SciPy sparse matrix") as archive, archive.open("format.npy") as file:
        shape, _, dtype = read_npy_header(cast(BinaryIO, file), path)
        if shape or dtype.kind not in "SU" or not 0 < dtype.itemsize <= _FORM_BYTES:
            raise FormatError(f"{path} is not a SciPy sparse matrix: its format is {dtype}{list(shape)}")
        found = np.frombuffer(file.read(dtype.itemsize), dtype)[0]
    return found.decode("ascii", "replace") if isinstance(found, bytes) else str(found)
