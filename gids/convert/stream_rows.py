"""Rows of a source that decodes in order only: StreamRows, and PackedRows of a zip file. Used by readers.

A table's writer reads every row once, from several threads, nearly in order. Rows that were skipped are kept
until they are read. A range that is not kept any more restarts the stream.
"""

from __future__ import annotations

import math
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gids.convert.untrusted import open_file, parsing, shortened
from gids.errors import FormatError
from gids.store.dtypes import byte_view, make_bools_proper

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


@dataclass(frozen=True)
class PackedMember:
    """A deflated member, whose packed bytes begin at `start` of the file."""

    path: Path
    info: zipfile.ZipInfo
    start: int

    def pieces(self, position: int) -> Iterator[bytes]:
        """The member's bytes from a position on. Raises FormatError for damage, and for a wrong checksum."""
        fault = f"is damaged in its member {shortened(self.info.filename)}"
        with open_file(self.path) as file:
            file.seek(self.start)
            with parsing(self.path, fault):
                packed = zipfile.ZipExtFile(file, "r", self.info)
                packed.seek(position)
            while position < self.info.file_size:
                with parsing(self.path, fault):
                    piece = packed.read(_PIECE_BYTES)
                if not piece:
                    raise FormatError(f"{self.path} {fault}: it has less than {self.info.file_size} bytes")
                position += len(piece)
                os.posix_fadvise(file.fileno(), self.start, file.tell() - self.start, os.POSIX_FADV_DONTNEED)
                yield piece


class PackedRows(StreamRows):
    """Rows of a C-order array from byte `offset` of a packed member on."""

    def __init__(
        self,
        member: PackedMember,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        offset: int,
        byte_swapped: bool = False,
    ) -> None:
        self._member, self._offset, self._byte_swapped = member, offset, byte_swapped
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        super().__init__(shape, dtype, lambda row: (row, self._tensors(row)))

    def _tensors(self, row: int) -> Iterator[torch.Tensor]:
        left = self.shape[0] - row
        if not self._row_bytes:
            yield torch.empty(left, *self.shape[1:], dtype=self.dtype)
            return
        held = bytearray()
        for piece in self._member.pieces(self._offset + row * self._row_bytes):
            held += piece
            count = min(left, len(held) // self._row_bytes)
            if count:
                yield self._decode(held[: count * self._row_bytes], count)
                del held[: count * self._row_bytes]
                left -= count
            if not left:
                return

    def _decode(self, data: bytearray, count: int) -> torch.Tensor:
        values = np.frombuffer(data, np.uint8)
        if self._byte_swapped and self.dtype.itemsize > 1:
            values.view(f"u{self.dtype.itemsize}").byteswap(inplace=True)
        return make_bools_proper(torch.from_numpy(values).view(self.dtype).view(count, *self.shape[1:]))

    def row(self, index: int) -> PackedRows:
        """The elements of one row, as rows."""
        return self._view(self._offset + index * self._row_bytes, self.shape[1:])

    def reshaped(self, shape: tuple[int, ...]) -> PackedRows:
        """The same elements in rows of another shape."""
        return self._view(self._offset, shape)

    def _view(self, offset: int, shape: tuple[int, ...]) -> PackedRows:
        return PackedRows(self._member, shape, self.dtype, offset=offset, byte_swapped=self._byte_swapped)
