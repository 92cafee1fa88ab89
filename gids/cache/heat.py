"""Heat: an estimate of how often each page is used. Called when a cache is built."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.errors import FormatError

_BLOCK_PAGES = 1 << 20
_OCTAVES = 24  # 255 steps over 24 octaves: about ten per factor of 2


def page_heat(
    weights: npt.NDArray[np.generic], rows_per_page: int, order: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.uint8]:
    """Quantise the weights of rows (out-degrees, expected visits) to one byte per page.

    weights: non-negative number[row_count], in any unit, memory-mapped or in memory; read in blocks. order:
    Table.order, or None if rows are stored by id. Returns uint8[page_count]: the sum over a page's rows on a
    logarithmic scale. 0 means no weight, 255 is the heaviest page. Pages more than 24 octaves below the
    heaviest get the same heat.
    """
    sums = page_weights(weights, rows_per_page, order)
    top = float(sums.max(initial=0.0))
    if top == 0:
        return np.zeros(len(sums), np.uint8)
    lightest = float(np.min(sums, where=sums > 0, initial=top))
    sums /= max(lightest, top / 2**_OCTAVES)
    sums += 1
    logs = np.log2(sums, out=sums)
    logs *= 255.0 / float(logs.max())
    return np.rint(logs, out=logs).astype(np.uint8)


def page_weights(
    weights: npt.NDArray[np.generic], rows_per_page: int, order: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.float32]:
    """The sum of the weights of each page's rows: float32[page_count]. Arguments as of page_heat."""
    row_count = len(weights)
    page_count = -(-row_count // rows_per_page)
    sums = np.zeros(page_count, np.float32)
    for first in range(0, page_count, _BLOCK_PAGES):
        last = min(page_count, first + _BLOCK_PAGES)
        part = slice(first * rows_per_page, last * rows_per_page)
        if order is not None:
            bad = _core.sum_by_page(order[part], np.asarray(weights[part], np.float32), rows_per_page, sums)
            if bad is not None:
                raise FormatError(
                    f"the order of rows is damaged at row {part.start + bad}; run `gids verify` for details"
                )
            continue
        rows = np.asarray(weights[part], np.float64)
        if rows_per_page > 1:
            rows = np.add.reduceat(rows, np.arange(0, len(rows), rows_per_page))
        sums[first:last] = rows
    return sums
