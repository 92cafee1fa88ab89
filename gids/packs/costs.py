"""What reading costs on a disk: random reads, long reads and long writes, measured once per device.

Called when a loader first considers packs. Knows files and rates, and nothing of minibatches.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gids import _core
from gids.io import open_engine
from gids.packs.scratch import BLOCK, Scratch, ScratchFile, ScratchFull

_PROBE_S = 0.15
"""Seconds that each of the three measurements takes at most, about."""

_LONG = 1 << 20
_PROBE_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskRates:
    """random_reads_per_s: of pages of page_bytes at the loader's queue depth. write_bytes_per_s: 0 without
    scratch."""

    page_bytes: int
    random_reads_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def gap_bytes(self) -> int:
        """Unwanted bytes that take as long to read as one more request."""
        return int(self.read_bytes_per_s / self.random_reads_per_s)


_known: dict[object, DiskRates] = {}


def measure_rates(
    paths: Sequence[str | os.PathLike[str]],
    scratch: Scratch | None,
    *,
    page_bytes: int,
    depth: int,
    direct: bool,
    engine: str,
) -> DiskRates:
    """The rates of the disks of these files and of scratch. Blocks for less than a second, once per disk.

    Raises OSError for a file that cannot be opened or read.
    """
    devices = frozenset(os.stat(path).st_dev for path in paths)
    on = None if scratch is None else os.stat(scratch.directory).st_dev
    key = (devices, on, page_bytes, depth, direct, engine)
    if key not in _known:
        found = DiskRates(
            page_bytes,
            _random_reads_per_s(paths, page_bytes, depth, direct, engine),
            _long_reads_per_s(paths, direct, engine),
            0.0 if scratch is None else _writes_per_s(scratch),
        )
        if scratch is not None and not found.write_bytes_per_s:
            return found  # the disk is full, or fails: not for ever
        _known[key] = found
    return _known[key]


def _random_reads_per_s(
    paths: Sequence[str | os.PathLike[str]], page_bytes: int, depth: int, direct: bool, kind: str
) -> float:
    rng = np.random.default_rng(0)
    pages = np.array([max(1, os.path.getsize(p) // page_bytes) for p in paths])
    with open_engine(
        paths, kind, depth=depth, direct=direct, max_read_bytes=page_bytes, max_merge_bytes=0
    ) as engine:
        count = 8 * depth
        out = np.empty((count, page_bytes), np.uint8)
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < _PROBE_S:
            files = rng.integers(0, len(paths), count).astype(np.uint32)
            offsets = rng.integers(0, pages[files]) * page_bytes
            engine.read(files, offsets, page_bytes, out)
            done += count
        return done / (time.perf_counter() - begun)


def _long_reads_per_s(paths: Sequence[str | os.PathLike[str]], direct: bool, kind: str) -> float:
    with open_engine(paths, kind, depth=16, direct=direct, max_read_bytes=_LONG) as engine:
        pieces = [
            (file, offset) for file, p in enumerate(paths) for offset in range(0, os.path.getsize(p), _LONG)
        ][: _PROBE_BYTES // _LONG]
        if not pieces:
            return 1e9
        sizes = np.array([min(_LONG, os.path.getsize(paths[f]) - at) for f, at in pieces], np.int64)
        memory = _core.PackMemory.create(16 * _LONG)
        priority = _core.Priority.create()
        done, begun = 0, time.perf_counter()
        for first in range(0, len(pieces), 16):
            reads = [
                _core.PackRead(engine.native, priority, f, at, memory, i * _LONG, int(sizes[first + i]))
                for i, (f, at) in enumerate(pieces[first : first + 16])
            ]
            for read in reads:
                read.wait()
            done += int(sizes[first : first + 16].sum())
            if time.perf_counter() - begun > _PROBE_S:
                break
        return done / (time.perf_counter() - begun)


def _writes_per_s(scratch: Scratch) -> float:
    """0 if scratch cannot be written."""
    file = scratch.open()
    try:
        _reserve(file, min(_PROBE_BYTES, (scratch.limit_bytes - scratch.taken_bytes) // 4))
        data = mmap.mmap(-1, 4 * _LONG)
        data[:] = os.urandom(len(data))  # a disk may recognize zeros
        begun, at = time.perf_counter(), 0
        while at < file.nbytes and time.perf_counter() - begun < _PROBE_S:
            at += os.pwrite(file.fd, memoryview(data)[: file.nbytes - at], at)
        return at / (time.perf_counter() - begun) if at else 0.0
    except (OSError, ScratchFull):
        return 0.0
    finally:
        file.close()


def _reserve(file: ScratchFile, nbytes: int) -> None:
    """Make the file so long, or as long as there is room for. Raises ScratchFull."""
    nbytes = max(BLOCK, nbytes // BLOCK * BLOCK)
    while True:
        try:
            return file.reserve(nbytes)
        except ScratchFull:
            if nbytes == BLOCK:
                raise
            nbytes = max(BLOCK, nbytes // 4 // BLOCK * BLOCK)
