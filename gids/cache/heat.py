"""Heat: what is known of a page's worth before anything was read. Called when a cache is built."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BLOCK_PAGES = 1 << 20


def page_heat(weights: npt.NDArray[np.generic], rows_per_page: int) -> npt.NDArray[np.uint8]:
    """Quantise the weights of rows (out-degrees, expected visits) to one byte per page.

    weights: non-negative number[row_count], memory-mapped or in memory; read in blocks.
    Returns uint8[page_count]: the sum over a page's rows on a logarithmic scale whose top, 255, is the
    heaviest page, so that a factor in weight is the same step everywhere on the scale.
    """
    row_count = len(weights)
    page_count = -(-row_count // rows_per_page)
    logs = np.empty(page_count, np.float32)
    for first in range(0, page_count, _BLOCK_PAGES):
        last = min(page_count, first + _BLOCK_PAGES)
        rows = np.asarray(weights[first * rows_per_page : last * rows_per_page], np.float64)
        if rows_per_page > 1:
            rows = np.add.reduceat(rows, np.arange(0, len(rows), rows_per_page))
        logs[first:last] = np.log2(1.0 + rows)
    top = float(logs.max(initial=0.0))
    if top > 0:
        logs *= 255.0 / top
    return np.rint(logs, out=logs).astype(np.uint8)
