"""RowReader: rows by random reads, while packs have the memory of the cache. For a second stream of a loader.

Called by the loader for streams that read through. No lookahead and no cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch

from gids import _core
from gids.errors import StorageError
from gids.io import Engine
from gids.packs.spaces import rows_of, spaces_of
from gids.packs.superbatch import PackMachine


class RowReader:
    """engine: opened on the shards of the machine's tables, in the order of `tables`."""

    def __init__(self, machine: PackMachine, engine: Engine, first_files: Mapping[str, int]) -> None:
        self._machine, self._engine, self._first_files = machine, engine, first_files

    def read_through(
        self, ids: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], StorageError | None]:
        """Rows in the order of their ids, and an error if some could not be read. Blocks.

        Raises as FeatureCache.read_through().
        """
        spaces = spaces_of([t for t in self._machine.tables if t.name in ids], ids)
        features: dict[str, torch.Tensor] = {}
        failed = None
        for space, rows in zip(spaces, rows_of(ids, spaces), strict=True):
            unique = np.unique(rows).astype(np.int64)
            wanted = _core.RowSet.create(space.row_count)
            wanted.insert(unique.astype(np.uint32))
            wanted.seal()
            for t in space.tables:
                pages, shards = unique // t.rows_per_page, len(t.shard_paths)
                files = (self._first_files[t.name] + pages % shards).astype(np.uint32)
                offsets = pages // shards * t.page_bytes + unique % t.rows_per_page * t.row_bytes
                memory = _core.PackMemory.create(max(1, len(unique) * t.row_bytes))
                errors = self._engine.read_extents(
                    files,
                    offsets,
                    np.full(len(unique), t.row_bytes),
                    memory.bytes(),
                    np.arange(len(unique)) * t.row_bytes,
                )
                if errors.any() and failed is None:
                    at = int(np.flatnonzero(errors)[0])
                    code, path = int(errors[at]), t.shard_paths[int(pages[at] % shards)]
                    reason = f"cannot read a row: {os.strerror(code)}"
                    failed = StorageError(code, reason, path, int(offsets[at]))
                features[t.name] = self._machine.gather(t, rows, [(wanted, memory, 0)])
        return features, failed
