"""Tables and pages as the request queue names them. Called by the queue and its users."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gids import _core


class QueueTable(NamedTuple):
    """The location of a table's pages in the engine's files.

    Page p is in file ``first_file + p % file_count`` at byte ``p // file_count * page_bytes``. checksums:
    uint32[page_count], CRC32C of each page, or None. A page that does not match gets the error EBADMSG.
    """

    page_count: int
    first_file: int
    file_count: int
    page_bytes: int
    checksums: npt.NDArray[np.uint32] | None = None


def requests_of(table: int, pages: torch.Tensor) -> torch.Tensor:
    """The requests, int64[n], for pages, int64[n], of a table (its index in the queue's tables)."""
    if not 0 <= table < _core.QUEUE_TABLES_MAX:
        raise ValueError(f"table must be 0 to {_core.QUEUE_TABLES_MAX - 1} (got {table})")
    return pages | table << _core.QUEUE_TABLE_SHIFT


def native_table(table: QueueTable) -> tuple[int, int, int, int, npt.NDArray[np.uint32] | None]:
    """The arguments of _core.QueueService. Raises ValueError for values out of range."""
    page_count, first_file, file_count, page_bytes = (int(n) for n in table[:4])
    for name, number in [("first_file", first_file), ("file_count", file_count), ("page_bytes", page_bytes)]:
        if not 0 <= number < 1 << 31:
            raise ValueError(f"{name} of a table must be 0 to 2**31 - 1 (got {number})")
    if not 0 <= page_count < 1 << 63:
        raise ValueError(f"page_count of a table must be 0 to 2**63 - 1 (got {page_count})")
    sums = table.checksums
    if sums is not None:
        if sums.dtype != np.uint32 or sums.ndim != 1:
            raise ValueError(f"checksums must be uint32[page_count] (got {sums.dtype}{list(sums.shape)})")
        sums = np.ascontiguousarray(sums)
    return page_count, first_file, file_count, page_bytes, sums
