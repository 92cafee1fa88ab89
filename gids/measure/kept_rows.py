"""Checks that rows of a side equal the source. Called by epoch.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gids.cache.output_dtype import out_dtype_of, out_row_bytes
from gids.store import Table

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
