"""Reads and checks the header of a .npy file. Called by array_files and scipy_sparse."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from gids.convert.damage import parsing
from gids.errors import FormatError
from gids.store.geometry import MAX_ROWS

MAX_HEADER_BYTES = 10_000  # NumPy's own limit, which it checks after it has read the header
_MAX_DIMENSIONS = 32
_MAX_ARRAY_BYTES = 1 << 62


class NpyHeader(NamedTuple):
    """shape: each length is 0 to MAX_ROWS. is_fortran: whether elements are in Fortran order."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[np.generic]


def read_npy_header(file: BinaryIO, path: Path | str) -> NpyHeader:
    """The header at a file's position. Moves to the data. path: for messages. Raises FormatError."""
    with parsing(path, "is not a valid .npy file"):
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise FormatError(f"{path} has .npy version {version}; it must be 1.0 or 2.0")
        prefix = file.read(2 if version == (1, 0) else 4)
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise FormatError(f"{path} has a .npy header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
        header = io.BytesIO(prefix + file.read(length))
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        found = NpyHeader(*read(header))
    _check_shape(found, path)
    return found


def _check_shape(header: NpyHeader, path: Path | str) -> None:
    shape = header.shape
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"{path} has an array of {len(shape)} dimensions; the limit is {_MAX_DIMENSIONS}")
    if any(type(n) is not int or not 0 <= n <= MAX_ROWS for n in shape):
        raise FormatError(f"{path} has an array of shape {shape}; lengths must be 0 to {MAX_ROWS}")
    if math.prod(n or 1 for n in shape) * max(1, header.dtype.itemsize) > _MAX_ARRAY_BYTES:
        raise FormatError(f"{path} has an array of shape {shape}, which is larger than any file")
