"""Where a layer's output goes: a table, or a tensor. Made by layerwise, filled block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from gids.store import Table
from gids.write.table_writer import TableWriter


class Sink(Protocol):
    """Takes the rows of one type; all have one shape and type."""

    def write(self, start: int, rows: torch.Tensor) -> None: ...


class TableSink:
    """A table, which is made when the first rows show their shape.

    make(shape, dtype): its writer. dtype: what floating rows are stored as; others stay what they are.
    """

    def __init__(
        self, make: Callable[[tuple[int, ...], torch.dtype], TableWriter], dtype: torch.dtype
    ) -> None:
        self._make, self._dtype = make, dtype
        self._writer: TableWriter | None = None
        self.given_dtype = dtype
        """What the layer gave."""

    @property
    def writer(self) -> TableWriter:
        assert self._writer is not None, "no rows were written, not even none"
        return self._writer

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._writer is None:
            self.given_dtype = rows.dtype
            dtype = self._dtype if rows.dtype.is_floating_point else rows.dtype
            self._writer = self._make(tuple(rows.shape[1:]), dtype)
        self._writer.write(start, rows)

    def finish(self) -> Table:
        """The table, which has all of its rows."""
        return self.writer.finish()


class TensorSink:
    """A tensor of `count` rows on the CPU, of the type that the layer gives."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None, "no rows were written, not even none"
        return self._values

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._values is None:
            self._values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self._values[start : start + len(rows)] = rows
