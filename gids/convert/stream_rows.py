"""Rows that are decoded or computed as they are read: StreamRows of a source that decodes in order only,
PackedRows of a zip file, and rows derived from others. Used by readers.

A table's writer reads every row once, from several threads, nearly in order. Rows that were skipped are kept
until they are read. A range that is not kept any more restarts the stream.
"""

from __future__ import annotations

import math
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids.convert.source_files import reading
from gids.errors import FormatError
from gids.store.dtypes import byte_view, make_bools_proper
from gids.store.rows import FileRows, GeneratedRows, Rows, read_range

BLOCK_BYTES = 8 << 20
"""Size of the blocks in which readers scan an array."""
_PIECE_BYTES = 2 << 20
KEPT_BYTES = 64 << 20  # limit for rows that were skipped; the requests of threads are closer together

Opener = Callable[[int], tuple[int, Iterator[torch.Tensor]]]


class StreamRows:
    """shape[0] rows of shape[1:] elements of dtype.

    open_at(row): (first row at or before row, the pieces from there on, a few MiB each). Memory: a piece or
    two if read in order, at most KEPT_BYTES.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, open_at: Opener) -> None:
        self.shape = shape
        self.dtype: torch.dtype = dtype
        self._open_at = open_at
        self._lock = threading.Lock()
        self._pieces: Iterator[torch.Tensor] | None = None
        self._at = 0  # the row that the next piece begins with
        self._kept: list[_Piece] = []

    def read_into(self, start: int, out: torch.Tensor) -> None:
        with self._lock:
            done = 0
            while done < len(out):
                piece = self._piece_with(start + done)
                part = piece.rows[start + done - piece.first :][: len(out) - done]
                byte_view(out[done : done + len(part)])[:] = byte_view(part)
                done += len(part)
                piece.unread -= len(part)
                if piece.unread <= 0:
                    self._kept.remove(piece)

    def _piece_with(self, row: int) -> _Piece:
        for piece in self._kept:
            if piece.first <= row < piece.first + len(piece.rows):
                return piece
        if self._pieces is None or row < self._at:
            self._at, self._pieces = self._open_at(row)
            self._kept.clear()
        pieces = self._pieces
        while True:
            rows = next(pieces, None)
            if rows is None:
                raise FormatError(f"an array is truncated: it has {self._at} of {self.shape[0]} rows")
            if not len(rows):
                continue
            self._kept.append(_Piece(self._at, rows, unread=len(rows)))
            self._at += len(rows)
            if self._at >= self.shape[0]:
                self._pieces = None  # closes the file; a source may have many
            while sum(piece.rows.nbytes for piece in self._kept) > KEPT_BYTES and len(self._kept) > 1:
                del self._kept[0]
            if row < self._at:
                return self._kept[-1]


@dataclass(eq=False)
class _Piece:
    """Rows from `first` on. unread: number of rows that were not read yet."""

    first: int
    rows: torch.Tensor
    unread: int


class PackedRows(StreamRows):
    """Rows of a C-order array in a deflated member of a zip file.

    offset: of the array in the member.
    """

    def __init__(
        self,
        path: Path,
        member: zipfile.ZipInfo,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        offset: int,
    ) -> None:
        self._member, self._offset = (path, member), offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        super().__init__(shape, dtype, lambda row: (row, self._tensors(row)))

    def _tensors(self, row: int) -> Iterator[torch.Tensor]:
        """The rows from `row` on. Raises FormatError for damage, and for a wrong checksum at the end."""
        path, member = self._member
        if not self._row_bytes:
            yield torch.empty(self.shape[0] - row, *self.shape[1:], dtype=self.dtype)
            return
        with zipfile.ZipFile(path) as archive, archive.open(member) as packed:
            with reading(f"{path}, member {member.filename},"):
                packed.seek(self._offset + row * self._row_bytes)
            while row < self.shape[0]:
                count = min(self.shape[0] - row, max(1, _PIECE_BYTES // self._row_bytes))
                row += count
                beyond = _PIECE_BYTES if row == self.shape[0] else 0  # zipfile compares checksums at the end
                with reading(f"{path}, member {member.filename},"):
                    data = packed.read(count * self._row_bytes + beyond)
                if len(data) < count * self._row_bytes:
                    raise FormatError(f"{path} is truncated in its member {member.filename}")
                if archive.fp is not None:
                    os.posix_fadvise(archive.fp.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                values = np.frombuffer(bytearray(data[: count * self._row_bytes]), np.uint8)
                tensor = torch.from_numpy(values).view(self.dtype)
                yield make_bools_proper(tensor.view(count, *self.shape[1:]))

    def row(self, index: int) -> PackedRows:
        """The elements of one row, as rows."""
        offset = self._offset + index * self._row_bytes
        return PackedRows(*self._member, self.shape[1:], self.dtype, offset=offset)

    def reshaped(self, shape: tuple[int, ...]) -> PackedRows:
        """The same elements in rows of another shape."""
        return PackedRows(*self._member, shape, self.dtype, offset=self._offset)


def derived(
    rows: Rows,
    function: Callable[[torch.Tensor, int], torch.Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
) -> Rows:
    """What function(rows, number of the first) makes of another array, block by block: shape (default: a
    number per row)."""
    step = max(1, BLOCK_BYTES // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))

    def fill(start: int, out: torch.Tensor) -> None:
        for first in range(start, start + len(out), step):
            part = out[first - start : first - start + step]
            part.copy_(function(read_range(rows, first, first + len(part)), first))

    return GeneratedRows(rows.shape[:1] if shape is None else shape, dtype, fill)


def column_of(rows: Rows, index: int) -> Rows:
    """One column of rows in two dimensions."""
    return derived(rows, lambda block, _: block[:, index], rows.dtype)


def saved(path: Path, pieces: Iterable[np.ndarray], like: Rows | None = None) -> FileRows:
    """Pieces of an array in a file that is written now: rows like others; None: int64, of one dimension."""
    count = 0
    with open(path, "wb") as out:
        for piece in pieces:
            out.write(piece.data)
            count += len(piece)
    shape, dtype = ((), torch.int64) if like is None else (like.shape[1:], like.dtype)
    return FileRows(path, (count, *shape), dtype)
