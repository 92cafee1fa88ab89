"""How each table is stored, and why: its page size, as given or the best one for its rows on this disk; and
the order of its rows, which is chosen after the graphs are written.

Called by run.py, `gids convert` and `gids info`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gids import _core
from gids.convert.options import Options
from gids.convert.source import Source, StoredTable, TableSource
from gids.errors import FormatError
from gids.store.geometry import DEFAULT_PAGE_BYTES, SECTOR_BYTES, SHORT_ROW_BYTES, Geometry, best_page_bytes
from gids.store.table import Table
from gids.write.dataset_writer import DatasetWriter
from gids.write.row_order import check_memory, community_order, degree_order

ORDERS = ("original", "degree", "community")
_FILE_BYTES = 8192

Compute = Callable[[], np.ndarray]


@dataclass(frozen=True)
class PageSizes:
    """How to choose a page size.

    fixed: the page size for all tables; None: chosen by row. alignment: of direct I/O on the disks. order: as
    in Options. Rows of nodes that are read together share pages, so these stay long.
    """

    fixed: int | None
    alignment: int
    order: str | None = None

    def choose(self, kind: str, row_bytes: int, stored: StoredTable | None = None) -> int:
        """Bytes of a page for rows of this length.

        kind: of the table, "node" or "edge". stored: of a dataset that is read: rows of the same length keep
        their page size.
        """
        if self.fixed is not None:
            return self.fixed
        if stored is not None and stored.row_bytes == row_bytes:
            return stored.page_bytes
        keeps_order = self.order is None and stored is not None and stored.order is not None
        if kind == "node" and (keeps_order or self.order not in (None, "original")):
            return DEFAULT_PAGE_BYTES
        return best_page_bytes(row_bytes, alignment=self.alignment)

    def key(self) -> int | str:
        """What a resumed conversion must have in common with the first run."""
        return f"for an alignment of {self.alignment}" if self.fixed is None else self.fixed


def explain_pages(table: Table) -> str:
    """A clause about the page size of a table, on the disk that the table is on."""
    alignment = max(_alignment_of(str(path)) for path in table.shard_paths)
    best = best_page_bytes(table.row_bytes, alignment=alignment)
    single = table.rows_per_page == 1
    count = "one row" if single else f"{table.rows_per_page} rows"
    rows = f"{count} of {table.row_bytes} B each"
    if table.page_bytes % alignment:
        return f"{rows}; direct I/O on this disk reads {alignment} B at a time: use --page-bytes {alignment}"
    if table.order is not None:
        return f"{rows}, in an order that puts rows together that are read together"
    if table.page_bytes > best and table.row_bytes <= SHORT_ROW_BYTES:
        return f"{rows}; if rows are read at random, a cache serves more of them with --page-bytes {best}"
    if single:
        return f"{rows}, so a cache holds no unwanted rows"
    if alignment > SECTOR_BYTES:
        return f"{rows}, because direct I/O on this disk reads {alignment} B at a time"
    return f"{rows}, the size that is cached best"


def direct_alignment(directories: Iterable[Path]) -> int:
    """The largest alignment of direct I/O in these directories, in bytes; 1 without direct I/O.

    Writes a small file without a name in each.
    """
    return max([1, *map(_alignment_in, directories)])


def _alignment_in(directory: Path) -> int:
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            with suppress(OSError):  # a full disk; most kernels state the alignment of an empty file too
                file.write(bytes(_FILE_BYTES))
                os.fsync(file.fileno())
            return _alignment_of(f"/proc/self/fd/{file.fileno()}")
    except OSError:  # DatasetWriter reports it
        return 1


def _alignment_of(file: str) -> int:
    """Of direct I/O on a file, in bytes; 1 without it."""
    try:
        alignment: int = _core.probe_file(file, direct=True)[1]
    except OSError:
        return 1
    return alignment


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
        writer, name, count = self.writer, table.name, table.rows.shape[0]
        if method is None:
            return None
        if method == "stored":
            assert table.stored is not None
            stored = table.stored.order
            return None if stored is None else lambda: stored
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
        check_memory(method, count, self.options.memory_bytes)
        return lambda: community_order(graphs, degrees) if graphs else degree_order(degrees)


def check_order(method: str | None, source: Source) -> None:
    """Raise FormatError for an unknown order, or if its graph is missing."""
    if method is not None and method not in ORDERS:
        raise FormatError(f"unknown order {method!r}; choose {', '.join(ORDERS)}")
    if method in ("degree", "community") and not source.graphs:
        raise FormatError(f"--order {method} needs a graph, and the source has none: use --order original")
