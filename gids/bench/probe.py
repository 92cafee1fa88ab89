"""The disk's ceiling: random reads of pages at a fixed depth, past the page cache.

Called by bandwidth.py and advise.py. Uses an I/O engine of gids without tables or cache.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gids.errors import StorageError
from gids.io import drop_page_cache, open_engine
from gids.io.disks import RING_READS_PER_S, ring_count
from gids.write.files import aligned_zeros

_LEAST_S = 0.5
_READS_MAX = 400_000
_RING_LIMIT = 0.7  # of RING_READS_PER_S: above it, a ring may be the limit
_FASTER = 1.1
_BATCH = 8192  # reads submitted together, in ascending order like a minibatch's


@dataclass(frozen=True)
class RawReads:
    """passes: number of passes over the files. note: why the page cache may have answered, or ""."""

    reads_per_s: float
    passes: int
    note: str = ""


def random_reads(
    paths: Sequence[str | os.PathLike[str]],
    *,
    page_bytes: int,
    seconds: float,
    depth: int = 256,
    seed: int = 0,
) -> RawReads:
    """Read distinct random pages for `seconds`, or until all pages or _READS_MAX are read. Blocks.

    Small files are read again, in another order, until _LEAST_S have passed: a short pass is not precise.
    Where the rings and not the disks may be the limit, it reads again with twice as many rings, as long as
    that is faster.

    Raises StorageError if a read fails, OSError, and ValueError for files smaller than a page.
    """
    sizes = np.array([os.path.getsize(path) // page_bytes for path in paths], np.int64)
    total = int(sizes.sum())
    if total == 0:
        raise ValueError(f"{paths[0]} is smaller than one page of {page_bytes} B: there is nothing to read")
    note = why_warm(paths)
    rings, most = ring_count(paths), ring_count(paths, reads_per_s=math.inf)
    best = reads = _random_reads(paths, sizes, page_bytes, seconds, depth, rings, seed)
    while reads.reads_per_s > _RING_LIMIT * RING_READS_PER_S * rings and rings < most:
        rings = min(2 * rings, most)
        reads = _random_reads(paths, sizes, page_bytes, seconds, depth, rings, seed)
        if reads.reads_per_s < _FASTER * best.reads_per_s:
            break
        best = reads
    return replace(best, note=note)


def _random_reads(
    paths: Sequence[str | os.PathLike[str]],
    sizes: npt.NDArray[np.int64],
    page_bytes: int,
    seconds: float,
    depth: int,
    rings: int,
    seed: int,
) -> RawReads:
    """sizes: of the files, in pages."""
    total = int(sizes.sum())
    rng = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    done = passes = 0
    with open_engine(
        paths,
        depth=depth,
        max_read_bytes=page_bytes,
        max_merge_bytes=0,
        direct=direct_works(paths),
        reads_per_s=rings * RING_READS_PER_S,
    ) as engine:
        out = aligned_zeros(min(_BATCH, total), page_bytes)
        out[:] = 0  # page faults are not measured
        taken = 0.0
        while not passes or (total <= _READS_MAX and taken < min(seconds, _LEAST_S)):
            passes += 1
            chosen = rng.choice(total, min(total, _READS_MAX), replace=False)
            begun = time.perf_counter()
            for first in range(0, len(chosen), _BATCH):
                pages = np.sort(chosen[first : first + _BATCH])
                files = np.searchsorted(ends, pages, "right")
                offsets = (pages - (ends - sizes)[files]) * page_bytes
                errors = engine.read(files.astype(np.uint32), offsets, page_bytes, out[: len(pages)])
                if errors.any():
                    bad = int(np.flatnonzero(errors)[0])
                    reason = os.strerror(int(errors[bad]))
                    raise StorageError(int(errors[bad]), reason, paths[int(files[bad])], int(offsets[bad]))
                done += len(pages)
                if taken + time.perf_counter() - begun > seconds:
                    break
            taken += time.perf_counter() - begun
    return RawReads(done / taken, passes)


def direct_works(paths: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether all files support direct I/O."""
    from gids.io.engine import probe

    return all(bool(probe(path)["direct"]) for path in paths)


def why_warm(paths: Sequence[str | os.PathLike[str]]) -> str:
    """Drop the files' pages from the page cache. Returns why that failed, or ""."""
    from gids.measure.isolation import cached_share

    try:
        for path in paths:
            drop_page_cache(path)
    except OSError as error:
        return f"results are WARM: the page cache could not be emptied of {error.filename}: {error.strerror}"
    left = max(cached_share(path) for path in paths)
    if left > 0.01:
        return f"results are WARM: {left:.0%} of a shard stays in the page cache (mapped, or in memory)"
    return ""
