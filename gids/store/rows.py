"""Rows: an array that can be read one range at a time. The input of writers.

Made by the converters; writers read ranges from several threads at once. Knows no pages or datasets.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from gids.errors import FormatError, StorageError
from gids.store.dtypes import byte_view, make_bools_proper, torch_dtype_of
from gids.stored_file import AnyFile, file_status, opened


class Rows(Protocol):
    """shape[0] rows of shape[1:] elements of dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def read_into(self, start: int, out: torch.Tensor) -> None:
        """Copy rows start … start + len(out) to out (contiguous, of this dtype). Any thread may call."""
        ...


class TensorRows:
    """Rows of a CPU tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.detach()
        self.shape = tuple(values.shape)
        self.dtype: torch.dtype = values.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        make_bools_proper(out.copy_(self.values[start : start + len(out)]))


class ArrayRows:
    """Rows of a NumPy array of either byte order."""

    def __init__(self, values: np.ndarray) -> None:
        dtype = torch_dtype_of(values.dtype)
        if dtype is None:
            raise FormatError(
                f"cannot store elements of type {values.dtype}: cast them to a number type first"
            )
        self._values = values
        self.shape = values.shape
        self.dtype: torch.dtype = dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        np.copyto(out.numpy(), self._values[start : start + len(out)])
        make_bools_proper(out)


class GeneratedRows:
    """Rows from a function: fill(start, out) writes rows start … start + len(out) to out."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[int, torch.Tensor], None]
    ) -> None:
        self.shape = tuple(shape)
        self.dtype: torch.dtype = dtype
        self.read_into = fill


class FileRows:
    """Rows of a C-order array in a file, from byte `offset` on. byte_swapped: the file is big-endian.

    The file is open only while it is read. Data that was read is dropped from the page cache, so that a
    conversion does not evict the data of other programs.
    """

    def __init__(
        self,
        path: AnyFile,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        offset: int = 0,
        byte_swapped: bool = False,
    ) -> None:
        self.file = path
        self.shape = shape
        self.dtype: torch.dtype = dtype
        self._offset = offset
        self._byte_swapped = byte_swapped
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        needed = offset + math.prod(shape) * dtype.itemsize
        size_bytes = file_status(path).st_size
        if size_bytes < needed:
            raise FormatError(f"{path} is truncated: {size_bytes} bytes, but {shape} {dtype} needs {needed}")

    def read_into(self, start: int, out: torch.Tensor) -> None:
        data = byte_view(out)
        offset = self._offset + start * self._row_bytes
        with opened(self.file) as fd:
            read_exactly(fd, data, offset, self.file)
            os.posix_fadvise(fd, offset, data.size, os.POSIX_FADV_DONTNEED)
        if self._byte_swapped and self.dtype.itemsize > 1:
            data.view(f"u{self.dtype.itemsize}").byteswap(inplace=True)
        make_bools_proper(out)

    def row(self, index: int) -> FileRows:
        """The elements of one row, as rows."""
        offset = self._offset + index * self._row_bytes
        return FileRows(self.file, self.shape[1:], self.dtype, offset=offset, byte_swapped=self._byte_swapped)

    def reshaped(self, shape: tuple[int, ...]) -> FileRows:
        """The same elements, in rows of another shape."""
        return FileRows(self.file, shape, self.dtype, offset=self._offset, byte_swapped=self._byte_swapped)


class ColumnRows:
    """Rows of a Fortran-order array in a file, gathered from its contiguous columns."""

    def __init__(self, elements: FileRows, shape: tuple[int, ...]) -> None:
        self.elements = elements  # all of them, in the order of the file
        self.shape = shape
        self.dtype: torch.dtype = elements.dtype

    def read_into(self, start: int, out: torch.Tensor) -> None:
        column = torch.empty(len(out), dtype=self.dtype)
        for index in range(math.prod(self.shape[1:])):
            self.elements.read_into(index * self.shape[0] + start, column)
            position = np.ravel_multi_index(
                np.unravel_index(index, self.shape[1:], order="F"), self.shape[1:]
            )
            out.view(len(out), -1)[:, int(position)] = column


Values = Rows | torch.Tensor | np.ndarray


def as_rows(values: Values) -> Rows:
    """Rows of a tensor or array. Rows are returned unchanged. Raises TypeError for anything else."""
    if isinstance(values, np.ndarray):
        return ArrayRows(values)
    if isinstance(values, torch.Tensor):
        if values.layout == torch.strided:
            return TensorRows(values)
    elif hasattr(values, "read_into"):
        return values
    what = "a sparse tensor" if isinstance(values, torch.Tensor) else type(values).__name__
    raise TypeError(f"values must be an array of NumPy or a dense tensor of torch (got {what})")


def read_range(rows: Rows, start: int, stop: int) -> torch.Tensor:
    """Read rows start … stop into new memory."""
    out = torch.empty((stop - start, *rows.shape[1:]), dtype=rows.dtype)
    if stop > start:
        rows.read_into(start, out)
    return out


def blocks(rows: Rows, block_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, rows) of pieces of at most block_bytes, or one row if a row is longer."""
    step = max(1, block_bytes // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
    for start in range(0, rows.shape[0], step):
        yield start, read_range(rows, start, min(start + step, rows.shape[0]))


def read_exactly(fd: int, out: np.ndarray, offset: int, path: str | os.PathLike[str]) -> None:
    """Fill out (uint8[bytes]) from a file. Raises StorageError on an error or at the end of the file."""
    view = memoryview(out.data)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise StorageError(error.errno or 0, "cannot read", path, offset + done) from error
        if count == 0:
            raise StorageError(errno.ENODATA, "the file ended early", path, offset + done)
        done += count
