"""RowReader: rows by random reads, while packs have the memory of the cache. For a second stream of a loader.

Called by the loader for streams that read through. No lookahead and no cache. Beside its outputs
it takes the memory that the plan of packs has for it.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.feature_cache import read_error
from gids.errors import StorageError
from gids.io import Engine
from gids.packs.spaces import Rows, rows_of, spaces_of
from gids.packs.superbatch import PackMachine
from gids.store.geometry import div_ceil

if TYPE_CHECKING:
    from gids.store import Table

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class RowReader:
    """engine: opened on the shards of these tables, in this order."""

    def __init__(self, machine: PackMachine, engine: Engine, tables: Sequence[Table]) -> None:
        self._machine, self._engine = machine, engine
        firsts = itertools.accumulate((len(t.shard_paths) for t in tables), initial=0)
        self._first_files = dict(zip((t.name for t in tables), firsts, strict=False))

    def read_through(
        self, ids: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        """Rows in the order of their ids, and an error if some could not be read. Blocks.

        Raises as FeatureCache.read_through().
        """
        ids = self._machine.rows.ids_on_host(ids)
        spaces = spaces_of([t for t in self._machine.tables if t.name in ids], ids)
        features: dict[str, torch.Tensor] = {}
        failed = None
        memory = _core.PackMemory.create(self._machine.plan.second_bytes)
        for space, rows in zip(spaces, rows_of(ids, spaces), strict=True):
            for t in space.tables:
                features[t.name], error = self._rows_of(t, rows, memory)
                failed = failed or error
        return self._machine.rows.from_host(features), failed

    def _rows_of(
        self, t: Table, rows: Rows, memory: _core.PackMemory
    ) -> tuple[torch.Tensor, StorageError | None]:
        """Rows of a table, as many at a time as fit into memory, and the first error."""
        host, failed = self._machine.rows.host, None
        read = self._read_pages if self._machine.check_crc else self._read_rows
        out, step = host.take(t, len(rows)), memory.nbytes // t.row_bytes
        for first in range(0, len(rows), step):
            unique, places = np.unique(rows[first : first + step], return_inverse=True)
            error = read(t, unique.astype(np.int64), memory.bytes()[: len(unique) * t.row_bytes])
            failed = failed or error
            every = _core.RowSet.create(len(unique))
            every.insert(np.arange(len(unique), dtype=np.uint32))
            every.seal()
            host.copy(t, places.astype(np.uint32), [(every, memory, 0)], out[first : first + step])
        return host.tensor(t, out), failed

    def _read_rows(self, t: Table, rows: Ids, out: Bytes) -> StorageError | None:
        """Read these rows to out, one after the other. Returns the error of the first that failed."""
        pages, lengths = rows // t.rows_per_page, np.full(len(rows), t.row_bytes)
        files, offsets = self._places(t, pages)
        offsets += rows % t.rows_per_page * t.row_bytes
        errors = self._engine.read_extents(files, offsets, lengths, out, np.arange(len(rows)) * t.row_bytes)
        return self._error(t, pages, offsets, errors)

    def _read_pages(self, t: Table, rows: Ids, out: Bytes) -> StorageError | None:
        """As _read_rows(), by pages of which the checksums are compared."""
        failed = None
        wanted, at = np.unique(rows // t.rows_per_page), np.arange(len(rows))
        most = self._machine.plan.second_bytes // t.page_bytes
        for pages in np.array_split(wanted, div_ceil(len(wanted), most)):
            files, offsets = self._places(t, pages)
            read = np.empty((len(pages), t.page_bytes), np.uint8)
            errors = self._engine.read(files, offsets, t.page_bytes, read)
            checksums = np.asarray(t.checksums())[pages]
            errors[(errors == 0) & (_core.crc32c(read) != checksums)] = errno.EBADMSG
            failed = failed or self._error(t, pages, offsets, errors)
            mine = np.isin(rows // t.rows_per_page, pages)
            stored = read[:, : t.rows_per_page * t.row_bytes].reshape(-1, t.row_bytes)
            page = np.searchsorted(pages, rows[mine] // t.rows_per_page)
            out.reshape(-1, t.row_bytes)[at[mine]] = stored[
                page * t.rows_per_page + rows[mine] % t.rows_per_page
            ]
        return failed

    def _places(self, t: Table, pages: Ids) -> tuple[npt.NDArray[np.uint32], Ids]:
        """(the engine's files, offsets) of pages."""
        shards = len(t.shard_paths)
        return (self._first_files[t.name] + pages % shards).astype(np.uint32), pages // shards * t.page_bytes

    def _error(
        self, t: Table, pages: Ids, offsets: Ids, errors: npt.NDArray[np.int32]
    ) -> StorageError | None:
        """Of the first read that failed."""
        if not errors.any():
            return None
        at = int(np.flatnonzero(errors)[0])
        path = t.shard_paths[int(pages[at] % len(t.shard_paths))]
        return read_error(int(errors[at]), path, int(offsets[at]))
