"""The features of a comparison: as stock loaders map them, and a check of the rows that a side got."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from gids.cache.output_dtype import out_row_bytes
from gids.store import Table

_KEPT_ROWS, _KEPT_BYTES = 64, 32 << 20  # of a minibatch; of all of them
_THREADS = 16  # for page faults in parallel


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


class KeptRows:
    """Keeps 64 rows of each minibatch, to compare them with the source after the training.

    In a long training it keeps those of every n-th minibatch: 32 MiB at most.
    """

    def __init__(self, batches: int, table: Table) -> None:
        self._every = -(-batches * _KEPT_ROWS * out_row_bytes(table, None) // _KEPT_BYTES)
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._batches = 0

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep some rows of the next minibatch; ids: int64[n], rows: [n, *shape]."""
        if self._batches % self._every == 0 and len(ids):
            chosen = torch.linspace(0, len(ids) - 1, _KEPT_ROWS).long()
            self._kept.append((ids[chosen], rows[chosen]))
        self._batches += 1

    def compare(self, source: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        """(rows compared, rows that differ). Compares bits: NaN equals NaN, and -0.0 differs from 0.0."""

        def differing(kept: tuple[Tensor, Tensor]) -> int:
            rows, right = kept[1], source(kept[0])
            assert right.dtype == rows.dtype
            return int((right.view(torch.uint8) != rows.view(torch.uint8)).any(dim=1).sum())

        with ThreadPoolExecutor(_THREADS) as pool:
            wrong = sum(pool.map(differing, self._kept))
        return _KEPT_ROWS * len(self._kept), wrong
