"""Chooses the order of the rows of each table. Called by run.py after the graphs are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gids.convert.source import Source, TableSource
from gids.errors import FormatError
from gids.store.geometry import Geometry
from gids.write.dataset_writer import DatasetWriter
from gids.write.row_order import check_memory, co_read_order, community_order, degree_order

if TYPE_CHECKING:
    from gids.convert.run import Options

Compute = Callable[[], np.ndarray]
ORDERS = ("original", "degree", "community", "trace")


ReadRows = Callable[[str, int], Callable[[], Iterable[np.ndarray]] | None]
"""(table, number of rows) -> a function that returns the rows of each minibatch of a trace, int64[n].

None for an unknown table. Raises FormatError for a table of another size, and for a trace of pages.
"""


def order_of(table: TableSource, layout: Geometry, method: str | None) -> str | None:
    """One of ORDERS but "original", "stored" (that of a dataset), or None: rows are in the order of ids.

    method: as in Options. Only rows of nodes that share pages get another order.
    """
    if method is None:
        return "stored" if table.stored is not None and table.stored.order is not None else None
    return method if method != "original" and table.kind == "node" and layout.rows_per_page > 1 else None


@dataclass
class RowOrders:
    """The orders of one conversion. Tables of one node type share an order, which is computed once.

    say(sentence): prints a note.
    """

    options: Options
    writer: DatasetWriter
    say: Callable[[str], None]
    _written: dict[str, str] = field(default_factory=dict)  # node type -> its first ordered table

    def choose(self, table: TableSource, method: str | None) -> Compute | None:
        """A function that computes the positions of a table's rows, or None for the order of ids.

        method: of order_of.
        """
        options, writer, name, count = self.options, self.writer, table.name, table.rows.shape[0]
        if method is None:
            return None
        if method == "stored":
            assert table.stored is not None
            stored = table.stored.order
            return None if stored is None else lambda: stored
        if method == "trace":
            assert options.read_rows is not None
            if (minibatches := options.read_rows(name, count)) is None:
                self.say(f"{name} is in the order of its ids: the trace has no rows of this table")
                return None
            return self._within_memory(
                method,
                count,
                lambda: co_read_order(
                    minibatches, count, writer.scratch, options.memory_bytes, workers=options.workers
                ),
            )
        assert isinstance(table.type, str)
        if (first := self._written.setdefault(table.type, name)) != name:
            order = writer.order(first)
            return None if order is None else lambda: order
        degrees = writer.out_degrees(table.type)
        if degrees is None:
            self.say(f"{name} is in the order of its ids: the source has no edges from {table.type!r} nodes")
            return None
        graphs = writer.in_edges(table.type) if method == "community" else []
        if method == "community" and not graphs:
            self.say(f"{name} is ordered by degree: no relation is from {table.type!r} to {table.type!r}")
        return self._within_memory(
            method, count, lambda: community_order(graphs, degrees) if graphs else degree_order(degrees)
        )

    def _within_memory(self, method: str, count: int, compute: Compute) -> Compute:
        """The same function, which raises FormatError if it needs more memory than there is. An order that is
        on disk when a conversion resumes is not computed, and needs none."""

        def checked() -> np.ndarray:
            check_memory(method, count, self.options.memory_bytes)
            return compute()

        return checked


def check_order(method: str | None, read_rows: ReadRows | None, source: Source) -> None:
    """Raise FormatError for an unknown order, or if its trace or graph is missing."""
    if method is not None and method not in ORDERS:
        raise FormatError(f"unknown order {method!r}; choose {', '.join(ORDERS)}")
    if method == "trace" and read_rows is None:
        raise FormatError("--order trace needs a recorded trace: give --order trace:FILE")
    if method in ("degree", "community") and not source.graphs:
        raise FormatError(f"--order {method} needs a graph, and the source has none: use --order original")
