"""StreamRows: Rows of a source that decodes in order only, such as a compressed array. Used by readers.

A table's writer reads every row once, from several threads, nearly in order. Rows that were skipped are kept
until they are read. A range that is not kept any more restarts the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gids.errors import FormatError
from gids.store.dtypes import byte_view

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
