"""Methods that give every node an owner. Called by run.py.

range and hash compute each owner by itself; community and metis are in clusters.py and metis.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from gids.store.manifest import owner_dtype

METHODS = ("range", "hash", "community", "metis")
_BLOCK = 1 << 20


def range_owners(count: int, parts: int) -> Iterator[np.ndarray]:
    """Contiguous ranges of ids, of equal size up to one row."""
    dtype = owner_dtype(parts)
    bounds = np.array([count * part // parts for part in range(1, parts + 1)], np.int64)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.int64)
        yield np.searchsorted(bounds, ids, side="right").astype(dtype)


def hash_owners(ntype: str, count: int, parts: int, seed: int) -> Iterator[np.ndarray]:
    """A random part for each node, a function of (seed, type, id) alone."""
    dtype = owner_dtype(parts)
    key = _mixed(np.array([seed], np.uint64)) ^ np.uint64(zlib.crc32(ntype.encode()))
    key = _mixed(key)
    for start in range(0, count, _BLOCK):
        ids = np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
        values = _mixed(_mixed(ids) ^ key) >> np.uint64(32)
        yield ((values * np.uint64(parts)) >> np.uint64(32)).astype(dtype)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
