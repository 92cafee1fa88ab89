"""The page size of each table: as given, or the best one for its rows on this disk, and why.

Called by run.py, `gids convert` and `gids info`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gids import _core
from gids.convert.source import StoredTable
from gids.store.geometry import DEFAULT_PAGE_BYTES, SECTOR_BYTES, SHORT_ROW_BYTES, best_page_bytes
from gids.store.table import Table

_FILE_BYTES = 8192


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
