"""The destination of a layer's output: a table or a tensor. Made by layerwise, filled block by block.

All rows of one type have the same shape and dtype.
"""

from __future__ import annotations

import torch

from gids.store import FeatureStore, Table
from gids.write import create_table, temporary_table
from gids.write.table_writer import TableWriter


class TableSink:
    """A table of `count` nodes of a type. It is created when the first rows show their shape.

    dtype: of floating-point rows; other rows keep theirs. key: of the table (None: a temporary one). replace:
    a table of that name.
    """

    def __init__(
        self,
        store: FeatureStore,
        ntype: str,
        count: int,
        dtype: torch.dtype,
        *,
        key: str | None = None,
        replace: bool = False,
    ) -> None:
        self._store, self._ntype, self._count, self._dtype = store, ntype, count, dtype
        self._key, self._replace = key, replace
        self._writer: TableWriter | None = None
        self.layer_dtype = dtype
        """The dtype of the layer's rows."""

    @property
    def writer(self) -> TableWriter:
        assert self._writer is not None, "write() was never called"
        return self._writer

    def write(self, start: int, rows: torch.Tensor) -> None:
        if self._writer is None:
            self.layer_dtype = rows.dtype
            dtype = self._dtype if rows.dtype.is_floating_point else rows.dtype
            shape, key = tuple(rows.shape[1:]), self._key
            if key is None:
                self._writer = temporary_table(self._store, self._ntype, self._count, shape, dtype)
            else:
                self._writer = create_table(
                    self._store, key, self._count, shape, dtype, type_=self._ntype, replace=self._replace
                )
        self._writer.write(start, rows)

    def finish(self) -> Table:
        """The finished table."""
        return self.writer.finish()

    def discard(self) -> None:
        """Remove the table, unless it was published."""
        if self._writer is not None:
            self._writer.discard()


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
