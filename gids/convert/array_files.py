"""Opens arrays in .npy, .npz, .pt, HDF5, safetensors and raw files, and CSR matrices, without reading them.
Called by the readers.

Compressed members of a .npz file are read as streams. Those in Fortran order are unpacked to scratch first.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch

from gids.convert.source import FEATURES, LABELS, NAMED, Source, described, numbers
from gids.convert.source_files import import_library, open_zip, reading, starts_with
from gids.convert.stream_rows import PackedRows
from gids.convert.torch_file import SPARSE, as_tensor, load_torch
from gids.errors import FormatError
from gids.store.dtypes import TABLE_DTYPES, table_dtype, torch_dtype_of
from gids.store.geometry import MAX_ROWS
from gids.store.rows import ColumnRows, FileRows, Rows, SliceRows, TensorRows, as_int64, read_range
from gids.write.files import check_space

_COPY_BYTES = 8 << 20
_PIECE_ENTRIES = 1 << 20  # of a sparse matrix
_CSR_PARTS = ("data", "indices", "indptr", "shape")
_MATRIX = re.compile(r"(?i:adj(_?t|_?mat(rix)?|acency\w*)?)|A")  # a graph


@dataclass(frozen=True)
class SourceArray:
    """An array in a source.

    rows: None if it cannot be stored; then `why` is the reason, and is_data: whether it may be data of nodes
    or edges, as single numbers, text and notes are not.
    """

    rows: Rows | None
    why: str = ""
    is_data: bool = False

    def take(self, name: str, where: object, source: Source) -> Rows | None:
        """The rows, or None if the source leaves the array out."""
        rows, why, is_data = self.rows, self.why, self.is_data
        if rows is not None:
            is_square = isinstance(rows, SparseRows) and len({*rows.shape}) == 1
            is_graph = _MATRIX.fullmatch(name) or (is_square and name not in (*FEATURES, *LABELS))
            if rows.dtype in TABLE_DTYPES.values() and (rows.shape or name == "num_nodes") and not is_graph:
                return rows
            is_data = bool(rows.shape)
            why = f"{described(rows)}, which tables cannot hold" if is_data else "a single number"
            if is_data and is_graph:
                why = "a matrix of edges: save edge_index, (2, E), or SciPy's CSR matrix as adj.npz"
        source.leave_out(f"{name!r} of {where}", why, name if is_data or name in NAMED else "")
        return None


class NpyHeader(NamedTuple):
    """shape: each length is 0 to MAX_ROWS. is_fortran: whether elements are in Fortran order."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[np.generic]


def read_npy_header(file: BinaryIO, path: Path | str) -> NpyHeader:
    """The header at a file's position. Moves to the data. path: for messages. Raises FormatError."""
    with reading(path):
        major, _ = np.lib.format.read_magic(file)  # version 3 is of structured types
        shape, is_fortran, dtype = getattr(np.lib.format, f"read_array_header_{major}_0")(file)
    if dtype.byteorder == ">":
        raise FormatError(
            f"{path} is big-endian ({dtype}); save values.astype(values.dtype.newbyteorder('<'))"
        )
    if not all(0 <= n <= MAX_ROWS for n in shape):
        raise FormatError(f"{path} has an array of shape {shape}; a length must be 0 to {MAX_ROWS}")
    return NpyHeader(shape, is_fortran, dtype)


def is_npy(path: Path) -> bool:
    """Whether a file is a .npy file."""
    return starts_with(path, b"\x93NUMPY")


def open_npy(path: Path, where: str = "") -> SourceArray:
    """The array of a .npy file. where: its name in messages (default: the path). Raises FormatError."""
    with open(path, "rb") as file:
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
    by_columns = is_fortran and len(shape) > 1
    rows = FileRows(path, (math.prod(shape),) if by_columns else shape, torch_dtype, offset=start)
    return SourceArray(ColumnRows(rows, shape) if by_columns else rows)


def _unusable(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> SourceArray:
    is_data = bool(shape) and dtype.kind not in "US"
    if dtype.hasobject:
        return SourceArray(None, "Python objects, which need unpickling", is_data)
    rest = "which tables cannot hold" if dtype.kind in "cf" else "not numbers"
    return SourceArray(None, f"of type {dtype}, {rest}", is_data)


def array_of(value: Any) -> SourceArray:
    """A value of a file of torch.save: a tensor, an array of NumPy, a number, or lists of numbers."""
    value = as_tensor(value)
    if isinstance(value, np.ndarray):
        return _unusable(value.dtype, value.shape)
    if not isinstance(value, torch.Tensor):
        values = value.values() if isinstance(value, Mapping) else value
        first = next(iter(values), "") if isinstance(values, Iterable) else values
        is_lookup = isinstance(value, (Mapping, set)) and isinstance(first, (int, float))
        return SourceArray(None, f"a {type(value).__name__}", not (is_lookup or isinstance(first, str)))
    if value.layout == torch.sparse_coo and value.dim() == 1:
        value = value.to_dense()
    is_plain = value.device.type == "cpu" and not (value.is_nested or value.is_quantized)
    if value.layout == torch.strided and is_plain:
        return SourceArray(TensorRows(value))
    is_matrix = value.layout in SPARSE and value.dim() == 2 and value.dense_dim() == 0
    if not is_matrix or not is_plain or value.dtype == torch.bfloat16:
        why = f"a {value.dim()}-dimensional tensor of layout {value.layout} and type {value.dtype}"
        return SourceArray(None, why, is_data=True)
    matrix = value.to_sparse_csr()
    parts = map(TensorRows, (matrix.values(), matrix.col_indices(), matrix.crow_indices()))
    return SourceArray(SparseRows(*parts, shape=(matrix.shape[0], matrix.shape[1])))


def open_torch(path: Path) -> dict[str, SourceArray]:
    """The tensor in a file of torch.save, with the name of the file, or those in a dictionary."""
    saved = load_torch(path)
    named = saved if isinstance(saved, Mapping) else {path.stem: saved}
    return {str(name): array_of(value) for name, value in named.items()}


def open_hdf5(path: Path) -> dict[str, SourceArray]:
    """The datasets of an HDF5 file by name (in groups: GROUP/NAME). Needs h5py."""
    h5py, arrays = import_library(path, "h5py"), dict[str, SourceArray]()

    def add(*groups: Any, prefix: str = "") -> None:
        """Add the members of the last group, by all their links. groups: also those above, against cycles."""
        for key in groups[-1]:
            name, member = prefix + key, groups[-1].get(key)
            if member is None:
                arrays[name] = SourceArray(None, "a link to nothing", is_data=True)
            elif isinstance(member, h5py.Group) and member not in groups:
                add(*groups, member, prefix=f"{name}/")
            elif isinstance(member, h5py.Dataset):
                dtype = np.dtype("U1") if h5py.check_string_dtype(member.dtype) else member.dtype
                if member.shape is None or torch_dtype_of(dtype) is None:
                    arrays[name] = _unusable(dtype, member.shape or ())
                else:
                    arrays[name] = SourceArray(SliceRows(member)) if member.shape else array_of(member[...])

    with reading(path):
        add(h5py.File(path, "r"))
    return arrays


def open_safetensors(path: Path) -> dict[str, SourceArray]:
    """The tensors of a safetensors file by name. Needs safetensors."""
    arrays = {}
    with reading(path):
        file = import_library(path, "safetensors").safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118
            values = file.get_slice(name)
            shape = values.get_shape()
            arrays[name] = SourceArray(
                SliceRows(values, shape) if shape else TensorRows(file.get_tensor(name))
            )
    return arrays


def open_npz(path: Path, scratch: Path) -> dict[str, SourceArray]:
    """The arrays of a .npz file by name, also those of a SciPy sparse matrix. Raises FormatError."""
    arrays: dict[str, SourceArray] = {}
    with open_zip(path) as archive:
        for number, member in enumerate(archive.infolist()):
            if member.filename.endswith(".npy"):
                unpacked = scratch / f"{path.stem}-{number}.npy"
                arrays[member.filename.removesuffix(".npy")] = _open_member(path, archive, member, unpacked)
            else:
                arrays[member.filename] = SourceArray(None, "not an array")
    return _sparse_parts(path, arrays) if {"format", "shape", "data"} <= arrays.keys() else arrays


def _open_member(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, unpacked: Path
) -> SourceArray:
    """The array of a member. unpacked: a file to unpack it to, if it is packed and in Fortran order."""
    where = f"{path}, member {member.filename},"
    with reading(where), archive.open(member) as file:  # which compares the header with the directory's
        header = read_npy_header(cast(BinaryIO, file), where)
        start = file.tell()
    shape, is_fortran, dtype = header
    if dtype.hasobject or (torch_dtype := torch_dtype_of(dtype)) is None:
        return _unusable(dtype, shape)
    needed = start + math.prod(shape) * dtype.itemsize
    if member.file_size < needed:
        raise FormatError(
            f"{path} is truncated: its member {member.filename} has {member.file_size} bytes, but {shape} "
            f"{dtype} needs {needed}"
        )
    if member.compress_type == zipfile.ZIP_STORED:
        return _in_place(path, header, _data_offset(path, member) + start)
    if is_fortran and len(shape) > 1:
        check_space([(unpacked.parent, member.file_size)])
        with archive.open(member) as packed, open(unpacked, "wb") as out:
            shutil.copyfileobj(packed, out, _COPY_BYTES)
        return open_npy(unpacked, where=where)
    return SourceArray(PackedRows(path, member, shape, torch_dtype, offset=start))


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<HH", file.read(30)[26:])
    return member.header_offset + 30 + int(name_bytes) + int(extra_bytes)


def open_raw(path: Path, dtype: str | None, shape: tuple[int, ...] | None) -> Rows:
    """The rows of a raw file. One length of shape may be -1, for as many as fit. Raises FormatError."""
    if dtype is None or not shape:
        raise FormatError(
            f"{path} has an unknown format: give --from NAME (see `gids convert --list`), or for raw binary "
            "--dtype float32 --shape ROWS,DIM; unpack an archive first, and save other files as .npy"
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


def _sparse_parts(path: Path, arrays: Mapping[str, SourceArray]) -> dict[str, SourceArray]:
    """The arrays of SciPy's CSR matrix as adj_data, …, or as attr_data, …, for a matrix that is not square or
    a file with that name. Raises FormatError for another form."""
    form = _form_of(path)
    if form != "csr" or any(name not in arrays for name in _CSR_PARTS):
        raise FormatError(
            f"{path} is a SciPy sparse matrix in {form} form; write it as CSR: "
            f"save_npz({path.name!r}, matrix.tocsr())"
        )
    shape = arrays["shape"].rows
    if shape is None:
        raise FormatError(f"{path} is a SciPy sparse matrix, but its shape is not two whole numbers")
    is_square = len(set(numbers(shape, 2, f"the shape of {path}"))) == 1
    role = path.stem if path.stem in ("adj", "attr") else "adj" if is_square else "attr"
    return {f"{role}_{name}": arrays[name] for name in _CSR_PARTS}


def _form_of(path: Path) -> str:
    """The content of the member `format`, such as "csr"."""
    with open_zip(path) as archive, archive.open("format.npy") as file:
        form = np.lib.format.read_array(file, allow_pickle=False).item()
    return form.decode("ascii", "replace") if isinstance(form, bytes) else str(form)
