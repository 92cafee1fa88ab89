"""Opens arrays in .npy, .npz and raw files, without reading them. Called by the readers.

Compressed members of a .npz file are read as streams. Those in Fortran order are unpacked to scratch first.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from gids.convert.damage import parsing, shortened
from gids.convert.npy_header import NpyHeader, read_npy_header
from gids.convert.packed_rows import PackedMember, PackedRows
from gids.convert.scipy_sparse import as_sparse_parts, is_scipy_sparse
from gids.convert.source_file import check_file, open_file
from gids.convert.zip_file import open_zip
from gids.errors import FormatError
from gids.store.dtypes import table_dtype, torch_dtype_of
from gids.store.rows import ColumnRows, FileRows, Rows
from gids.write.space import check_space

_COPY_BYTES = 8 << 20
MAX_ARRAYS = 10_000  # in a .npz file, as a dataset may have this number of tables
_ENCRYPTED = 1  # a bit of a member's flags


@dataclass(frozen=True)
class Found:
    """An array in a source.

    rows: None if it cannot be stored; then `why` is the reason, and kind is "text", "objects", "complex" or
    "other", or "" for what is not an array of rows.
    """

    rows: Rows | None
    why: str = ""
    kind: str = ""


def open_npy(path: Path, where: str = "") -> Found:
    """The array of a .npy file. where: its name in messages (default: the path). Raises FormatError."""
    return _in_place(path, *_header_at(path, 0, where or path))


def open_numbers(path: Path) -> Rows:
    """The rows of a .npy file that must hold numbers. Raises FormatError."""
    rows = open_npy(path).rows
    if rows is None or not rows.shape:
        raise FormatError(f"{path} must hold an array of numbers")
    return rows


def _header_at(path: Path, offset: int, where: str | Path) -> tuple[NpyHeader, int]:
    """The .npy header at an offset of a file, and the offset of the data."""
    with open_file(path) as file:
        file.seek(offset)
        return read_npy_header(file, where), file.tell()


def _in_place(path: Path, header: NpyHeader, start: int) -> Found:
    shape, is_fortran, dtype = header
    if dtype.hasobject or (torch_dtype := torch_dtype_of(dtype)) is None:
        return _unusable(dtype, shape)
    is_swapped = dtype.byteorder == ">"
    flat = is_fortran and len(shape) > 1
    rows: Rows = FileRows(
        path, (math.prod(shape),) if flat else shape, torch_dtype, offset=start, byte_swapped=is_swapped
    )
    return Found(ColumnRows(rows, shape) if flat and isinstance(rows, FileRows) else rows)


def open_npz(path: Path, scratch: Path) -> dict[str, Found]:
    """The arrays of a .npz file by name. Raises FormatError."""
    found = {}
    with open_zip(path, "is not a valid .npz file") as archive:
        members = archive.infolist()
        if len(members) > MAX_ARRAYS:
            raise FormatError(f"{path} has {len(members)} members; the limit is {MAX_ARRAYS}")
        for number, member in enumerate(members):
            if not member.filename.endswith(".npy"):
                found[member.filename] = Found(None, why="not an array")
                continue
            rows = _open_member(path, archive, member)
            if rows is None:
                unpacked = scratch / f"{path.stem}-{number}.npy"
                check_space([(scratch, member.file_size)], [])
                _unpack(archive, member, unpacked)
                rows = open_npy(unpacked, where=_where(path, member))
            found[member.filename.removesuffix(".npy")] = rows
    return found


def _where(path: Path, member: zipfile.ZipInfo) -> str:
    return f"{path}, member {shortened(member.filename)},"


def _open_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Found | None:
    """The rows of a member, or None if it must be unpacked first."""
    if member.flag_bits & _ENCRYPTED:
        raise FormatError(f"{_where(path, member)} is encrypted")
    if member.compress_type == zipfile.ZIP_STORED:
        return _open_stored(path, member)
    if member.compress_type == zipfile.ZIP_DEFLATED:
        return _open_deflated(path, archive, member)
    raise FormatError(
        f"{_where(path, member)} uses zip compression method {member.compress_type}; "
        "write it with np.savez or np.savez_compressed"
    )


def _open_stored(path: Path, member: zipfile.ZipInfo) -> Found:
    offset = _data_offset(path, member)
    header, start = _header_at(path, offset, _where(path, member))
    _check_size(path, member, header, start - offset)
    return _in_place(path, header, start)


def _open_deflated(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Found | None:
    name = shortened(member.filename)
    packed = PackedMember(
        path, name, _data_offset(path, member), member.compress_size, member.file_size, member.CRC
    )
    with parsing(_where(path, member), "is damaged"), archive.open(member) as file:
        header = read_npy_header(cast(BinaryIO, file), _where(path, member))
        start = file.tell()
    shape, is_fortran, dtype = header
    if dtype.hasobject or (torch_dtype := torch_dtype_of(dtype)) is None:
        return _unusable(dtype, shape)
    _check_size(path, member, header, start)
    if is_fortran and len(shape) > 1:
        return None
    rows = PackedRows(packed, shape, torch_dtype, offset=start, byte_swapped=dtype.byteorder == ">")
    return Found(rows)


def _check_size(path: Path, member: zipfile.ZipInfo, header: NpyHeader, header_bytes: int) -> None:
    needed = header_bytes + math.prod(header.shape) * header.dtype.itemsize
    if member.file_size < needed:
        raise FormatError(
            f"{path} is truncated: its member {shortened(member.filename)} has {member.file_size} bytes, "
            f"but {header.shape} {header.dtype} needs {needed}"
        )


def _unusable(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Found:
    kinds = {"O": "objects", "U": "text", "S": "text", "c": "complex"}
    kind = kinds.get(dtype.kind, "other") if shape else ""
    if dtype.hasobject:
        return Found(None, why="Python objects, which need unpickling", kind=kind)
    rest = "which tables cannot hold" if dtype.kind in "cf" else "not numbers"
    return Found(None, why=f"of type {dtype}, {rest}", kind=kind)


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


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    with archive.open(member) as packed, open(target, "wb") as file:
        while block := packed.read(_COPY_BYTES):
            file.write(block)


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
    if min(shape) < 0 or math.prod(shape) * type_.itemsize != size:
        needed = math.prod(shape) * type_.itemsize
        raise FormatError(
            f"{path} has {size} bytes, but {dtype}{list(shape)} needs {needed}; check --dtype and --shape"
        )
    return FileRows(path, shape, type_)


def directory_arrays(
    folder: Path,
    scratch: Path,
    dtype: str | None,
    shape: tuple[int, ...] | None,
    leave_out: Container[Path] = (),
) -> Iterator[tuple[str, Found]]:
    """(name, array) of each .npy, .npz member and .bin in a directory, by file name."""
    for path in sorted(p for p in folder.iterdir() if p not in leave_out):
        if path.suffix == ".npy":
            yield path.stem, open_npy(path)
        elif path.suffix == ".npz":
            found = open_npz(path, scratch)
            if is_scipy_sparse(found):
                if path.stem not in ("adj", "attr"):
                    raise FormatError(
                        f"{path} is a SciPy sparse matrix: call it adj.npz (graph) or attr.npz (features)"
                    )
                found = as_sparse_parts(path, found, path.stem)
            yield from found.items()
        elif path.suffix == ".bin":
            yield path.stem, Found(open_raw(path, dtype, shape))
        elif path.is_file():
            yield path.name, Found(None, why="not .npy, .npz or .bin")
