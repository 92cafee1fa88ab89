"""How fast disks answer random reads, and how many reads must be pending so that they are busy.

Called by loaders, which plan so many minibatches. Knows files, reads and seconds, and no datasets.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gids.io.engine import open_engine
from gids.stored_file import AnyFile, file_status

PEAK_SHARE = 0.98
"""Of the disks' peak rate, that reads shall reach."""

_ALONE = 16
"""Reads that are made one at a time."""

_TOGETHER = 3
"""Rounds of many reads at a time, of which the fastest counts."""

_ENOUGH_S = 0.02
"""Fewer of either are made if they take so long together; of the many a fourth, if that does."""


@dataclass(frozen=True)
class DiskSpeed:
    """Of random reads of a page.

    reads_per_s: of all disks together, while they have more to do than they can. latency_s: seconds of one
    read alone: the disk's, and the system's until its caller goes on.
    """

    reads_per_s: float
    latency_s: float

    def pending(self, share: float = PEAK_SHARE) -> float:
        """Reads that must be pending at once, so that the disks reach this share of their rate."""
        return share * self.reads_per_s * self.latency_s / (1 - share)

    def minibatches(self, pages: float, hit_ratio: float) -> int:
        """Minibatches that must be planned at once for that, at least 1. pages: that one needs. hit_ratio: of
        these pages, 0 to 1; the others are read."""
        return max(1, math.ceil(self.pending() / max(1.0, pages * (1 - hit_ratio))))


known_speeds: dict[object, DiskSpeed] = {}
"""What was measured, by the disks, the size of a page and the engine."""


def known_speed(
    files: Sequence[AnyFile], page_bytes: int, kind: str, *, depth: int, direct: bool, most_bytes: int
) -> DiskSpeed:
    """measure_speed(), once in a process for the same disks, pages and engine."""
    disks = frozenset(file_status(file).st_dev for file in files)
    key = (disks, page_bytes, kind, depth, direct)
    if key not in known_speeds:
        known_speeds[key] = measure_speed(
            files, page_bytes, kind, depth=depth, direct=direct, most_bytes=most_bytes
        )
    return known_speeds[key]


def measure_speed(
    files: Sequence[AnyFile], page_bytes: int, kind: str, *, depth: int, direct: bool, most_bytes: int
) -> DiskSpeed:
    """The speed of the disks of these files.

    Blocks for about 30 ms; on a slow disk until half of `depth` reads are done. kind, depth, direct: of
    open_engine. most_bytes: the most that is read at a time. If no file holds a page, both numbers are 0.
    Raises what open_engine raises.
    """
    counts = np.array([file_status(file).st_size // page_bytes for file in files])
    if not counts.any():
        return DiskSpeed(0.0, 0.0)
    most = max(1, min(2 * depth, most_bytes // page_bytes))
    few = max(1, most // 4)
    rng = np.random.default_rng()
    chosen = rng.choice(np.flatnonzero(counts), most).astype(np.uint32)
    out = np.frombuffer(mmap.mmap(-1, most * page_bytes), np.uint8).reshape(most, -1)  # aligned
    with open_engine(
        files, kind, depth=depth, direct=direct, max_read_bytes=page_bytes, max_merge_bytes=0
    ) as engine:

        def seconds_of(count: int) -> float:
            of_reads = chosen[:count]
            offsets = rng.integers(0, counts[of_reads]) * page_bytes
            begun = time.perf_counter()
            engine.read(of_reads, offsets, page_bytes, out[:count])
            return time.perf_counter() - begun

        seconds_of(1)  # what happens once is not measured
        alone = [seconds_of(1)]
        while len(alone) < _ALONE and sum(alone) < _ENOUGH_S:
            alone.append(seconds_of(1))
        together = [seconds_of(few)]
        rate = few / together[0]
        while len(together) <= _TOGETHER and sum(together) < _ENOUGH_S:
            together.append(seconds_of(most))
            rate = max(rate, most / together[-1])  # a busy processor makes it slower
    return DiskSpeed(rate, float(np.median(alone)))
