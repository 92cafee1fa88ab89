"""The features of a comparison: as stock DGL maps them, and a check that the rows of a side equal the source.

Called by epoch.py, gids.bench.epoch and the scripts in bench/.
"""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from gids.cache.output_dtype import out_dtype_of, out_row_bytes
from gids.store import Table


def why_no_array(table: Table) -> str:
    """Why the rows of a table cannot be mapped as one array; "" if they can."""
    if table.scale is not None:
        return "its rows are int8 with a scale"
    if table.dtype == torch.bfloat16:
        return "NumPy has no bfloat16"
    if len(table.shard_paths) > 1:
        return f"its pages are spread over {len(table.shard_paths)} shards"
    if table.order is not None:
        return "its rows are not stored in the order of their ids"
    if table.rows_per_page * table.row_bytes != table.page_bytes:
        return f"rows of {table.row_bytes} B leave a part of each page of {table.page_bytes} B empty"
    return ""


def map_array(table: Table, *, random_access: bool) -> Tensor:
    """Map the rows of a table without a reason of why_no_array: [row_count, *shape].

    random_access: without read-ahead.
    """
    [shard] = table.shard_paths
    dtype = np.dtype(str(table.dtype).removeprefix("torch."))
    # Not "c": the kernel refuses a private map of more than the machine's memory.
    features = np.memmap(shard, dtype, "r", shape=(table.row_count, *table.shape))
    if random_access:
        features._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(features)


_KEPT_ROWS, _KEPT_BYTES = 64, 32 << 20  # of a minibatch; of all of them
_COMPARE_S = 10.0
_THREADS = 16


class KeptRows:
    """Keeps 64 rows of each minibatch, to compare them with the source after the training.

    In a long training it keeps fewer rows, and not of every minibatch: 32 MiB at most, allocated here.
    """

    def __init__(self, batches: int, table: Table) -> None:
        row_bytes = out_row_bytes(table, None)
        self._per_batch = max(1, min(_KEPT_ROWS, _KEPT_BYTES // (batches * row_bytes)))
        self._every = -(-batches * self._per_batch * row_bytes // _KEPT_BYTES)
        count = -(-batches // self._every) * self._per_batch
        self._ids = torch.full((count,), -1)
        self._rows = torch.full((count, *table.shape), 0, dtype=out_dtype_of(table, None))
        self._batches = self._count = 0

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep some rows of the next minibatch; ids: int64[n], rows: [n, *shape]."""
        if self._batches % self._every == 0 and len(ids):
            chosen = torch.linspace(0, len(ids) - 1, self._per_batch).long()
            place = slice(self._count, self._count + self._per_batch)
            self._ids[place], self._rows[place] = ids[chosen], rows[chosen]
            self._count += self._per_batch
        self._batches += 1

    def compare(self, source: Callable[[Tensor], Tensor], *, seconds: float = _COMPARE_S) -> tuple[int, int]:
        """Return (rows compared, rows that differ). Compares bits: NaN equals NaN, and -0.0 differs from 0.0.

        Stops after about `seconds`, because a busy disk may take long.
        """
        begun = time.perf_counter()

        def differing(place: slice) -> tuple[int, int]:
            if place.start and time.perf_counter() - begun > seconds:
                return 0, 0
            rows, right = self._rows[place], source(self._ids[place])
            assert right.dtype == rows.dtype
            differ = right.view(torch.uint8) != rows.view(torch.uint8)
            return len(rows), int(differ.any(dim=1).sum())

        places = [
            slice(start, min(start + _KEPT_ROWS, self._count)) for start in range(0, self._count, _KEPT_ROWS)
        ]
        with ThreadPoolExecutor(_THREADS) as pool:  # for page faults in parallel
            counts = list(pool.map(differing, places))
        return sum(compared for compared, _ in counts), sum(wrong for _, wrong in counts)
