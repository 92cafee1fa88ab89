"""HostGather: copies rows out of packs in host memory, by native threads, in the dtype of the features.

Called by HostRows for minibatches, and by RowReader. Knows row sets and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.output_dtype import out_dtype_of, row_form
from gids.packs.spaces import Rows
from gids.store.dtypes import make_bools_proper

if TYPE_CHECKING:
    from gids.store import Table

Bytes = npt.NDArray[np.uint8]


class HostGather:
    """threads: that copy rows. pool_bytes: memory of outputs that is kept for later ones. output_rows: rows
    that an output has room for, by table."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        threads: int,
        output_dtype: torch.dtype | None,
        pool_bytes: int = 0,
        output_rows: Mapping[str, int] | None = None,
    ) -> None:
        self._workers = _core.Workers.create(threads)
        self._pool_bytes, self._pool = pool_bytes, _core.BufferPool.create(pool_bytes)
        self._dtypes = {t.name: out_dtype_of(t, output_dtype) for t in tables}
        self._forms = {t.name: row_form(t, output_dtype) for t in tables}
        self._output_rows = output_rows or {}

    @property
    def peak_bytes(self) -> int:
        """The most that outputs took."""
        found: int = self._pool.peak_bytes
        return found

    def lend(self) -> int:
        """Give the memory back that no features are in, until it is needed. Returns the bytes of features."""
        self._pool.keep(0)
        self._pool.keep(self._pool_bytes)
        return self._pool.taken_bytes

    def close(self) -> None:
        """Give the memory back that no features are in. Idempotent."""
        self._pool.keep(0)

    def take(self, table: Table, count: int) -> Bytes:
        """Memory for the output of so many rows: uint8[count, bytes of a row]."""
        form, room = self._forms[table.name], self._output_rows.get(table.name, 0)
        flat = self._pool.take(count * form.out_row_bytes, room * form.out_row_bytes)
        return flat.reshape(count, form.out_row_bytes)

    def copy(
        self,
        table: Table,
        rows: Rows,
        holders: Sequence[tuple[_core.RowSet, _core.PackMemory, int]],
        out: Bytes,
    ) -> int:
        """Copy rows of a table from the first of holders that has them: (set, memory, offset of its rows).

        rows: numbers of the holders' sets. out: of take(); rows that no holder has do not change there.
        Returns how many were copied.
        """
        form = self._forms[table.name]
        missing: int = _core.gather_packed(
            self._workers,
            rows,
            list(holders),
            row_bytes=table.row_bytes,
            stored_as=form.stored_as,
            wanted_as=form.wanted_as,
            row_values=form.values,
            scales=form.scales,
            out=out,
        )
        return len(rows) - missing

    def tensor(self, table: Table, out: Bytes) -> torch.Tensor:
        """What copy() has filled, as features."""
        flat = torch.from_numpy(out.reshape(-1)).view(self._dtypes[table.name])
        return make_bools_proper(flat.view(len(out), *table.shape))
