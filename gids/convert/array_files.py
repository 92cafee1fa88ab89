"""Opens arrays in .npy, .npz and raw files, without reading them. Called by the readers.

Compressed members of a .npz file are read as streams. Those in Fortran order are unpacked to scratch first.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from gids.convert.stream_rows import PackedRows
from gids.convert.untrusted import check_file, open_file, open_zip, parsing, shortened, starts_with
from gids.errors import FormatError
from gids.store.dtypes import table_dtype, torch_dtype_of
from gids.store.geometry import MAX_ROWS
from gids.store.rows import ColumnRows, FileRows, Rows
from gids.write.files import check_space

MAX_ARRAYS = 10_000  # in a .npz file, as a dataset may have this number of tables
MAX_HEADER_BYTES = 10_000  # NumPy's own limit, which it checks after it has read the header
_COPY_BYTES = 8 << 20
_MAX_DIMENSIONS = 32
_MAX_ARRAY_BYTES = 1 << 62
_ENCRYPTED = 1  # a bit of a member's flags


@dataclass(frozen=True)
class SourceArray:
    """An array in a source.

    rows: None if it cannot be stored; then `why` is the reason, and kind is "text", "objects", "complex" or
    "other", or "" for what is not an array of rows.
    """

    rows: Rows | None
    why: str = ""
    kind: str = ""


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
        shape, is_fortran, dtype = read(header)
    if len(shape) > _MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n <= MAX_ROWS for n in shape):
        raise FormatError(
            f"{path} has an array of shape {shape}; it may have {_MAX_DIMENSIONS} dimensions, and lengths "
            f"must be 0 to {MAX_ROWS}"
        )
    if math.prod(n or 1 for n in shape) * max(1, dtype.itemsize) > _MAX_ARRAY_BYTES:
        raise FormatError(f"{path} has an array of shape {shape}, which is larger than any file")
    return NpyHeader(shape, is_fortran, dtype)


def is_npy(path: Path) -> bool:
    """Whether a file is a .npy file."""
    return starts_with(path, b"\x93NUMPY")


def open_npy(path: Path, where: str = "") -> SourceArray:
    """The array of a .npy file. where: its name in messages (default: the path). Raises FormatError."""
    with open_file(path) as file:
        return _in_place(path, read_npy_header(file, where or path), file.tell())


def open_numbers(path: Path) -> Rows:
    """The rows of a .npy file that must hold numbers. Raises FormatError."""
    rows = open_npy(path).rows
    if rows is None or not rows.shape:
        raise FormatError(f"{path} must hold an array of numbers")
    return rows


def _in_place(path: Path, header: NpyHeader, start: int) -> SourceArray:
    """The array whose data begins at an offset of a file."""
    shape, is_fortran, dtype = header
    if dtype.hasobject or (torch_dtype := torch_dtype_of(dtype)) is None:
        return _unusable(dtype, shape)
    by_columns, swapped = is_fortran and len(shape) > 1, dtype.byteorder == ">"
    length = (math.prod(shape),) if by_columns else shape
    rows = FileRows(path, length, torch_dtype, offset=start, byte_swapped=swapped)
    return SourceArray(ColumnRows(rows, shape) if by_columns else rows)


def _unusable(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> SourceArray:
    kinds = {"O": "objects", "U": "text", "S": "text", "c": "complex"}
    kind = kinds.get(dtype.kind, "other") if shape else ""
    if dtype.hasobject:
        return SourceArray(None, why="Python objects, which need unpickling", kind=kind)
    rest = "which tables cannot hold" if dtype.kind in "cf" else "not numbers"
    return SourceArray(None, why=f"of type {dtype}, {rest}", kind=kind)


def open_npz(path: Path, scratch: Path) -> dict[str, SourceArray]:
    """The arrays of a .npz file by name. Raises FormatError."""
    arrays = {}
    with open_zip(path, "is not a valid .npz file") as archive:
        members = archive.infolist()
        if len(members) > MAX_ARRAYS:
            raise FormatError(f"{path} has {len(members)} members; the limit is {MAX_ARRAYS}")
        for number, member in enumerate(members):
            if member.filename.endswith(".npy"):
                unpacked = scratch / f"{path.stem}-{number}.npy"
                arrays[member.filename.removesuffix(".npy")] = _open_member(path, archive, member, unpacked)
            else:
                arrays[member.filename] = SourceArray(None, why="not an array")
    return arrays


def _open_member(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, unpacked: Path
) -> SourceArray:
    """The array of a member. unpacked: a file to unpack it to, if it is packed and in Fortran order."""
    name, method = shortened(member.filename), member.compress_type
    where = f"{path}, member {name},"
    if member.flag_bits & _ENCRYPTED or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(
            f"{where} is encrypted or uses another zip compression than deflate (method {method}); write it "
            "with np.savez or np.savez_compressed"
        )
    offset = _data_offset(path, member)
    with parsing(where, "is damaged"), archive.open(member) as file:
        header = read_npy_header(cast(BinaryIO, file), where)
        start = file.tell()
    shape, is_fortran, dtype = header
    if dtype.hasobject or (torch_dtype := torch_dtype_of(dtype)) is None:
        return _unusable(dtype, shape)
    needed = start + math.prod(shape) * dtype.itemsize
    if member.file_size < needed:
        raise FormatError(
            f"{path} is truncated: its member {name} has {member.file_size} bytes, but {shape} {dtype} "
            f"needs {needed}"
        )
    if method == zipfile.ZIP_STORED:
        return _in_place(path, header, offset + start)
    if is_fortran and len(shape) > 1:
        check_space([(unpacked.parent, member.file_size)])
        with archive.open(member) as packed, open(unpacked, "wb") as out:
            shutil.copyfileobj(packed, out, _COPY_BYTES)
        return open_npy(unpacked, where=where)
    swapped = dtype.byteorder == ">"
    return SourceArray(
        PackedRows(path, member, offset, shape, torch_dtype, offset=start, byte_swapped=swapped)
    )


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    header = b""
    if member.header_offset >= 0:  # negative if bytes before the directory are missing
        with open_file(path) as file:
            file.seek(member.header_offset)
            header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise FormatError(f"{path} is damaged at the beginning of its member {shortened(member.filename)}")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    return member.header_offset + 30 + int(name_bytes) + int(extra_bytes)


def open_raw(path: Path, dtype: str | None, shape: tuple[int, ...] | None) -> Rows:
    """The rows of a raw file. One length of shape may be -1, for as many as fit. Raises FormatError."""
    check_file(path)
    if dtype is None or not shape:
        raise FormatError(
            f"{path} has an unknown format: give --from NAME (see `gids convert --list`), unpack an archive "
            "first, or for raw binary give --dtype float32 --shape ROWS,DIM"
        )
    type_ = table_dtype(dtype)
    size = os.path.getsize(path)
    if shape.count(-1) == 1:
        rest = -math.prod(shape) * type_.itemsize
        if rest == 0 or size % rest:
            raise FormatError(f"{path} has {size} bytes, not a multiple of the {rest} bytes of a row")
        shape = tuple(size // rest if n == -1 else n for n in shape)
    needed = math.prod(shape) * type_.itemsize
    if min(shape) < 0 or needed != size:
        raise FormatError(
            f"{path} has {size} bytes, but {dtype}{list(shape)} needs {needed}; check --dtype and --shape"
        )
    return FileRows(path, shape, type_)
