"""Computes the column scales of a table in one pass over the source. Called by DatasetWriter.

The largest magnitudes so far are saved in the workplace, so that a killed pass resumes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gids.store.manifest import entry_json
from gids.store.quantize import scales_of
from gids.store.rows import Rows
from gids.write.array_file import ArrayFile
from gids.write.narrow import finite_float32, pieces
from gids.write.sync import write_synced
from gids.write.workplace import Workplace

_BLOCK_BYTES = 8 << 20


def write_column_scales(
    place: Workplace, path: str, rows: Rows, *, sync_bytes: int, on_rows: Callable[[int], None]
) -> dict[str, Any]:
    """Write a scale per column, float32[*shape of a row], to path. Returns its entry as JSON.

    on_rows(n): progress. Raises FormatError if a value is not finite.
    """
    item = f"scales {path}"

    def work() -> Any:
        maxima = _column_maxima(place, item, rows, sync_bytes=sync_bytes, on_rows=on_rows)
        with ArrayFile(place.root, path, "float32", rows.shape[1:]) as file:
            file.append(scales_of(maxima).numpy())
            return entry_json(file.finish())

    found: dict[str, Any] = place.once(item, work, on_skip=lambda: on_rows(rows.shape[0]))
    return found


def _column_maxima(
    place: Workplace, item: str, rows: Rows, *, sync_bytes: int, on_rows: Callable[[int], None]
) -> torch.Tensor:
    """The largest magnitude in each column, float32[width]."""
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
    return maxima
