"""The rows of a recorded trace, for `gids convert --order trace:FILE`. Called by gids.cli and gids.bench."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from gids.errors import FormatError
from gids.trace.trace_file import Trace


class RowTrace:
    """An open trace of rows; its minibatches method is a gids.convert.table_orders.ReadRows.

    Raises FormatError if the file is not a trace, or a trace of pages; OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._trace = Trace(path)
        if not all(t.of_rows for t in self._trace.tables):
            raise FormatError(
                f"{path} is a trace of pages, and an order needs a trace of rows: record one with `gids "
                "bench hit-ratio --record FILE --rows` or gids.trace.record(loader, FILE, rows=True)"
            )

    def minibatches(self, table: str, row_count: int) -> Callable[[], Iterable[npt.NDArray[np.int64]]] | None:
        trace = self._trace
        if table not in [t.name for t in trace.tables]:
            return None
        number = trace.table_number(table)
        traced = trace.tables[number]
        if traced.page_count != row_count:
            raise FormatError(
                f"{trace.path} was recorded with {traced.page_count} rows of {table!r}, not {row_count}: it "
                "is from another dataset"
            )
        return lambda: (trace.pages(batch, number) for batch in range(trace.batch_count))
