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
from gids.write.scattered_rows import bytes_needed

if TYPE_CHECKING:
    from gids.convert.run import Options

Compute = Callable[[], np.ndarray]
ORDERS = ("original", "degree", "community", "trace")


ReadRows = Callable[[str, int], Callable[[], Iterable[np.ndarray]] | None]
"""(table, number of rows) -> a function that returns the rows of each minibatch of a trace, int64[n].

None for an unknown table. Raises FormatError for a table of another size, and for a trace of pages.
"""


@dataclass
class RowOrders:
    """The orders of one conversion. Tables of one node type share an order, which is computed once.

    options.order: one of ORDERS; None: "original", or the stored order of a dataset. say(sentence): prints a
    note.
    """

    options: Options
    writer: DatasetWriter
    say: Callable[[str], None]
    _written: dict[str, str] = field(default_factory=dict)  # node type -> its first ordered table

    def choose(self, table: TableSource, layout: Geometry) -> Compute | None:
        """A function that computes the positions of a table's rows, or None for the original order."""
        method, name, count = self.options.order, table.name, table.rows.shape[0]
        if method is None and (stored := stored_order(table)) is not None:
            return lambda: stored
        if method in (None, "original") or not is_ordered(table, layout):
            return None
        assert method is not None
        assert isinstance(table.type, str)
        if method == "trace":
            return self._traced(name, count)
        if (first := self._written.setdefault(table.type, name)) != name:
            order = self.writer.order(first)
            return None if order is None else lambda: order
        degrees = self.writer.out_degrees(table.type)
        if degrees is None:
            self.say(f"{name} is in the order of its ids: the source has no edges from {table.type!r} nodes")
            return None
        check_memory(method, count, self.options.memory_bytes)
        graphs = self.writer.in_edges(table.type) if method == "community" else []
        if method == "community" and not graphs:
            self.say(f"{name} is ordered by degree: no relation is from {table.type!r} to {table.type!r}")
        return lambda: community_order(graphs, degrees) if graphs else degree_order(degrees)

    def _traced(self, name: str, count: int) -> Compute | None:
        options, scratch = self.options, self.writer.scratch
        assert options.read_rows is not None
        minibatches = options.read_rows(name, count)
        if minibatches is None:
            self.say(f"{name} is in the order of its ids: the trace has no rows of this table")
            return None
        check_memory("trace", count, options.memory_bytes)
        workers = options.workers
        return lambda: co_read_order(minibatches, count, scratch, options.memory_bytes, workers=workers)


def check_order(method: str | None, read_rows: ReadRows | None, source: Source) -> None:
    """Raise FormatError for an unknown order, or if its trace or graph is missing."""
    if method is not None and method not in ORDERS:
        raise FormatError(f"unknown order {method!r}; choose {', '.join(ORDERS)}")
    if method == "trace" and read_rows is None:
        raise FormatError("--order trace needs a recorded trace: give --order trace:FILE")
    if method in ("degree", "community") and not source.graphs:
        raise FormatError(f"--order {method} needs a graph, and the source has none: use --order original")


def stored_order(table: TableSource) -> np.ndarray | None:
    return None if table.stored is None else table.stored.order


def is_ordered(table: TableSource, layout: Geometry) -> bool:
    """Whether an order applies: several rows of nodes share a page."""
    return table.kind == "node" and layout.rows_per_page > 1


def bytes_aside(table: TableSource, layout: Geometry, method: str | None) -> int:
    """Extra disk space for an ordered table: its order, and its rows while they are written."""
    keeps = method is None and stored_order(table) is not None
    if not keeps and (method in (None, "original") or not is_ordered(table, layout)):
        return 0
    return bytes_needed(table.rows) + 8 * layout.row_count
