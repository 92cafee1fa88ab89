"""The destination of a layer's output: a table or a tensor. Made by layerwise, filled block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gids.store import Table
from gids.write.table_writer import TableWriter


class Sink(Protocol):
    """Takes the rows of one type, which all have the same shape and dtype."""

    def write(self, start: int, rows: torch.Tensor) -> None: ...


class TableSink:
    """A table. It is created when the first rows show their shape.

    make(shape, dtype): creates the writer. dtype: of floating-point rows; other rows keep theirs.
    """

    def __init__(
        self, make: Callable[[tuple[int, ...], torch.dtype], TableWriter], dtype: torch.dtype
    ) -> None:
        self._make, self._dtype = make, dtype
        self._writer: TableWriter | None = None
        self.given_dtype = dtype
        """The dtype of the layer's rows."""

    @property
    def writer(self) -> TableWriter:
        assert self._writer is not None, "write() was never called"
        return self._writer

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._writer is None:
            self.given_dtype = rows.dtype
            dtype = self._dtype if rows.dtype.is_floating_point else rows.dtype
            self._writer = self._make(tuple(rows.shape[1:]), dtype)
        self._writer.write(start, rows)

    def finish(self) -> Table:
        """The finished table."""
        return self.writer.finish()


class TensorSink:
    """A tensor of `count` rows on the CPU, in the layer's dtype."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None, "write() was never called"
        return self._values

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._values is None:
            self._values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self._values[start : start + len(rows)] = rows
