"""Owners: which rank has the row of an id. Called by the exchanges; knows arrays only."""

from __future__ import annotations

from typing import Protocol

import numpy as np

_PRIME = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio: multiplicative hashing


class Owners(Protocol):
    """The owner of every id, 0 to count - 1."""

    @property
    def count(self) -> int: ...
    def of(self, ids: np.ndarray) -> np.ndarray:
        """The owners of ids, int64[n]: whole numbers[n]."""
        ...


class GivenOwners:
    """owners: uint8 or uint16[ids]."""

    def __init__(self, owners: np.ndarray, count: int) -> None:
        self._owners, self.count = owners, count

    def of(self, ids: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._owners[ids]
        return found


class HashOwners:
    """Blocks of `block` successive ids are spread evenly: a page's rows have one owner.

    positions: the position of each id, or None; blocks are of positions then.
    """

    def __init__(self, count: int, block: int = 1, positions: np.ndarray | None = None) -> None:
        self.count, self._block, self._positions = count, block, positions

    def of(self, ids: np.ndarray) -> np.ndarray:
        mixed = (_at(ids, self._positions) // self._block).astype(np.uint64) * _PRIME
        return ((mixed >> np.uint64(32)) * np.uint64(self.count) >> np.uint64(32)).astype(np.int64)


class RangeOwners:
    """Each owner has successive ids, equally many but for blocks of `block` ids, which have one owner.

    positions: as of HashOwners.
    """

    def __init__(self, count: int, ids: int, block: int = 1, positions: np.ndarray | None = None) -> None:
        self.count, self._block, self._positions = count, block, positions
        self._blocks = max(1, -(-ids // block))

    def of(self, ids: np.ndarray) -> np.ndarray:
        found: np.ndarray = _at(ids, self._positions) // self._block * self.count // self._blocks
        return found


def _at(ids: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    return ids if positions is None else positions[ids].astype(np.int64, copy=False)


def split(owners: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(order, counts): int64[n], the positions by owner, those of one owner in their order; int64[count]."""
    narrow = owners.astype(np.uint16, copy=False)  # radix sort
    return np.argsort(narrow, kind="stable"), np.bincount(narrow, minlength=count)
