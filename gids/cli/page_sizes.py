"""Why the pages of a table have their size, and what would be better. Called by convert.py and info.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gids import _core
from gids.store.geometry import SECTOR_BYTES, SHORT_ROW_BYTES, best_page_bytes

if TYPE_CHECKING:
    from gids.store import Table


def explain_pages(table: Table) -> str:
    """A clause about the page size of a table, on the disk that the table is on."""
    alignment = max(map(_alignment, map(str, table.shard_paths)))
    best = best_page_bytes(table.row_bytes, alignment=alignment)
    single = table.rows_per_page == 1
    rows = (
        f"one row of {table.row_bytes} B each"
        if single
        else f"{table.rows_per_page} rows of {table.row_bytes} B each"
    )
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


def _alignment(path: str) -> int:
    """Of direct I/O on a file, in bytes; 1 without it."""
    try:
        found: int = _core.probe_file(path, direct=True)[1]
    except OSError:
        return 1
    return found
