"""Computes the column scales of a table in one pass over the source. Called by DatasetWriter.

The largest magnitudes so far are saved in the workplace, so that a killed pass resumes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch

from gids.store.quantize import scales_of
from gids.store.rows import Rows
from gids.write.narrow import finite_float32, pieces
from gids.write.sync import write_synced
from gids.write.workplace import Workplace

_BLOCK_BYTES = 8 << 20


def column_scales(
    place: Workplace, item: str, rows: Rows, *, sync_bytes: int, on_rows: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yield the scales of the columns, float32[width], once.

    item: in the journal. on_rows(n): progress. Raises FormatError if a value is not finite.
    """
    width, row_count = math.prod(rows.shape[1:]), rows.shape[0]
    saved = place.partial / "column-maxima"
    first = place.pages_done(item)
    if first and saved.is_file() and saved.stat().st_size == 4 * width:
        maxima = torch.from_numpy(np.fromfile(saved, np.float32))
    else:
        first, maxima = 0, torch.zeros(width)
    on_rows(first)
    row_bytes = max(1, width * rows.dtype.itemsize)
    step, unsaved = max(1, min(_BLOCK_BYTES, sync_bytes) // row_bytes), 0
    for start in range(first, row_count, step):
        count = min(step, row_count - start)
        for at, values in pieces(rows, start, count):
            largest = finite_float32(values, at).reshape(len(values), -1).abs().amax(0)
            maxima = torch.maximum(maxima, largest)
        on_rows(count)
        unsaved += count * row_bytes
        if unsaved >= sync_bytes:
            new = saved.with_suffix(".new")
            write_synced(new, maxima.numpy().tobytes())
            os.replace(new, saved)
            place.record_pages(item, start + count)
            unsaved = 0
    yield scales_of(maxima).numpy()
