"""Fills lines with the hottest pages before the first minibatch. Called when a device's cache is built.

A page that cannot be read stays out of the cache. The minibatch that needs it gets the error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.state import RESIDENT, TableState
from gids.errors import StorageError

if TYPE_CHECKING:
    from gids.io import Engine
    from gids.io.device.device_queue import QueueTable
    from gids.io.device.extents import ExtentReader

_log = logging.getLogger("gids")
_CHUNK_BYTES = 64 << 20
_BLOCK = 1 << 24  # bincount makes 8 bytes of each page's heat

Pages = npt.NDArray[np.int64]


def preload(
    state: TableState,
    engine: Engine,
    in_files: QueueTable,
    *,
    heat: npt.NDArray[np.uint8] | None,
    reader: ExtentReader | None,
) -> None:
    """Fill lines in device memory with the hottest pages, and lines in host memory with the next.

    Pages without heat go only into lines that are never replaced; those are always filled.
    in_files: the table's pages in the engine's files, and checksums to compare. reader: reads straight
    into device memory; without one, or with checksums, the engine reads into host memory. torch's current
    stream must be the cache's. Blocks.
    """
    page_count = state.table.page_count
    near = _hottest(heat, page_count, state.device_lines)
    far = np.setdiff1d(_hottest(heat, page_count, state.line_count), near, assume_unique=True)
    near = _warm(near, heat)
    if state.replaced > state.device_lines:
        far = _warm(far, heat)
    near, far = (_in_files(pages, len(state.table.shard_paths)) for pages in (near, far))
    loader = _Loader(state, engine, in_files)
    if reader is not None and in_files.checksums is None:
        loader.near_by_extents(near, reader)
    else:
        loader.near_by_engine(near)
    loader.far(far)


class _Loader:
    def __init__(self, state: TableState, engine: Engine, in_files: QueueTable) -> None:
        self._state = state
        self._engine = engine
        self._first_file = in_files.first_file
        self._checksums = in_files.checksums
        self._chunk = max(1, _CHUNK_BYTES // state.table.page_bytes)

    def near_by_extents(self, pages: Pages, reader: ExtentReader) -> None:
        """The reader joins pages that are neighbors in a file, as their lines are neighbors too."""
        page_bytes, flat = self._state.table.page_bytes, self._state.near.view(-1)
        for start, part in self._chunks(pages):
            lines = np.arange(start, start + len(part))
            try:
                reader.read(*self._locate(part), np.full(len(part), page_bytes), flat, lines * page_bytes)
            except StorageError as error:
                _log.warning("%d hot pages were not preloaded: %s", len(part), error)
                continue
            self._publish(part, lines)

    def near_by_engine(self, pages: Pages) -> None:
        near = self._state.near
        buffer = np.empty((min(self._chunk, max(1, len(pages))), near.shape[1]), np.uint8)
        for start, part in self._chunks(pages):
            rows, lines = buffer[: len(part)], np.arange(start, start + len(part))
            read = self._read(part, rows)
            near[start : start + len(part)] = torch.from_numpy(rows).to(near.device)
            self._publish(part[read], lines[read])

    def far(self, pages: Pages) -> None:
        lines = self._state.far_lines()
        for start, part in self._chunks(pages):
            read = self._read(part, lines[start : start + len(part)])
            self._publish(part[read], (self._state.device_lines + start + np.arange(len(part)))[read])

    def _chunks(self, pages: Pages) -> Iterator[tuple[int, Pages]]:
        for start in range(0, len(pages), self._chunk):
            yield start, pages[start : start + self._chunk]

    def _locate(self, pages: Pages) -> tuple[npt.NDArray[np.uint32], Pages]:
        shards = len(self._state.table.shard_paths)
        files = (self._first_file + pages % shards).astype(np.uint32)
        return files, pages // shards * self._state.table.page_bytes

    def _read(self, pages: Pages, out: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Read pages; returns bool[n], whether each was read."""
        files, offsets = self._locate(pages)
        ok = self._engine.read(files, offsets, out.shape[1], out) == 0
        if self._checksums is not None:
            ok &= _core.crc32c(out) == self._checksums[pages]
        if not ok.all():
            _log.warning(
                "%d of %d hot pages of table '%s' cannot be read; minibatches that need them will fail",
                np.count_nonzero(~ok),
                len(pages),
                self._state.table.name,
            )
        return np.asarray(ok)

    def _publish(self, pages: Pages, lines: Pages) -> None:
        device = self._state.words.device
        at, line = torch.from_numpy(pages).to(device), torch.from_numpy(lines).to(device)
        self._state.words[at] = self._state.words[at] | line << _core.LINE_SHIFT | RESIDENT
        self._state.owners[line] = at + 1


def _hottest(heat: npt.NDArray[np.uint8] | None, page_count: int, count: int) -> Pages:
    """The `count` hottest pages, ascending; among equally hot pages the first ones."""
    count = min(count, page_count)
    if heat is None or count == 0:
        return np.arange(count, dtype=np.int64)
    by_heat = np.zeros(_core.HEAT_LEVELS, np.int64)
    for start in range(0, page_count, _BLOCK):
        by_heat += np.bincount(heat[start : start + _BLOCK], minlength=_core.HEAT_LEVELS)
    hotter = np.cumsum(by_heat[::-1])[::-1]  # pages of this heat or more
    cut = int(np.flatnonzero(hotter >= count)[-1])
    above = np.flatnonzero(heat > cut)
    level = np.flatnonzero(heat == cut)[: count - len(above)]
    pages: Pages = np.union1d(above, level).astype(np.int64)
    return pages


def _warm(pages: Pages, heat: npt.NDArray[np.uint8] | None) -> Pages:
    if heat is None:
        return pages[:0]
    return pages[heat[pages] > 0]


def _in_files(pages: Pages, shards: int) -> Pages:
    """Sorted by shard, then page."""
    return pages[np.lexsort((pages, pages % shards))]
