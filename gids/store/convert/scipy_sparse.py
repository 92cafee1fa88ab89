"""Matrices that scipy.sparse.save_npz wrote, by the names that gids has for the parts of one.

Called by array_files and readers.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from gids.errors import FormatError

_PARTS = ("data", "indices", "indptr", "shape")
T = TypeVar("T")


def is_scipy_sparse(names: Container[str]) -> bool:
    """Whether the arrays of a .npz file are those of a sparse matrix of SciPy's."""
    return "format" in names and "shape" in names and "data" in names


def as_sparse_parts(path: Path, found: Mapping[str, T], role: str = "") -> dict[str, T]:
    """adj_data, … or attr_data, … of a matrix in CSR form.

    role: "adj" or "attr"; a square matrix is adj unless told. Raises FormatError for another form.
    """
    try:
        with np.load(path) as file:
            form, shape = file["format"].item(), file["shape"].tolist()
    except (ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise FormatError(f"{path} is damaged in its members format and shape: {error}") from None
    form = form.decode("ascii", "replace") if isinstance(form, bytes) else str(form)
    if form != "csr" or any(name not in found for name in _PARTS):
        raise FormatError(
            f"{path} is a sparse matrix of SciPy's in {form} form: save_npz({path.name!r}, matrix.tocsr()) "
            "makes one that can be read"
        )
    role = role or ("adj" if len(set(shape)) == 1 else "attr")
    return {f"{role}_{name}": found[name] for name in _PARTS}
