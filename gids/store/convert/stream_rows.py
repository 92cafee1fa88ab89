"""StreamRows: rows that can only be produced in order, as Rows that any thread may ask for. Used by readers.

The source of a compressed array is a stream. A table's writer asks for ranges from several threads, nearly in
order; so what was produced lately is kept, and a range that lies further back starts the stream again, from
the last place that it can start from.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

KEPT_BYTES = 64 << 20

Opener = Callable[[int], tuple[int, Iterator[torch.Tensor]]]


class StreamRows:
    """shape[0] rows of shape[1:] elements of dtype.

    open_at(row): a place to start from at or before a row, and the pieces from there on, a few MiB each.
    Memory: KEPT_BYTES and a piece.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, open_at: Opener) -> None:
        self.shape = shape
        self.dtype: torch.dtype = dtype
        self._open_at = open_at
        self._lock = threading.Lock()
        self._pieces: Iterator[torch.Tensor] | None = None
        self._at = 0  # the row that the next piece begins with
        self._kept: deque[tuple[int, torch.Tensor]] = deque()
        self._kept_bytes = 0

    def read_into(self, start: int, out: torch.Tensor) -> None:
        with self._lock:
            done = 0
            while done < len(out):
                first, piece = self._piece_with(start + done)
                part = piece[start + done - first :][: len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)

    def _piece_with(self, row: int) -> tuple[int, torch.Tensor]:
        for first, piece in self._kept:
            if first <= row < first + len(piece):
                return first, piece
        if self._pieces is None or row < self._at:
            self._at, self._pieces = self._open_at(row)
            self._kept.clear()
            self._kept_bytes = 0
        while True:
            piece = next(self._pieces)
            first, self._at = self._at, self._at + len(piece)
            self._keep(first, piece)
            if row < self._at:
                return first, piece

    def _keep(self, first: int, piece: torch.Tensor) -> None:
        self._kept.append((first, piece))
        self._kept_bytes += piece.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft()[1].nbytes
