"""Owners: which rank has the row of an id. Called by the exchanges; knows arrays only."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

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
        owners: np.ndarray = self._owners[ids]
        return owners


class HashOwners:
    """Blocks of `block` successive ids are spread evenly: a page's rows have one owner.

    positions: the position of each id, or None; blocks are of positions then.
    """

    def __init__(self, count: int, block: int = 1, positions: np.ndarray | None = None) -> None:
        self.count, self._block, self._positions = count, block, positions

    def of(self, ids: np.ndarray) -> np.ndarray:
        mixed = (positions_of(ids, self._positions) // self._block).astype(np.uint64) * _PRIME
        return ((mixed >> np.uint64(32)) * np.uint64(self.count) >> np.uint64(32)).astype(np.int64)


class RangeOwners:
    """Each owner has successive ids, equally many but for blocks of `block` ids, which have one owner.

    positions: as of HashOwners.
    """

    def __init__(self, count: int, ids: int, block: int = 1, positions: np.ndarray | None = None) -> None:
        self.count, self._block, self._positions = count, block, positions
        self._blocks = max(1, -(-ids // block))

    def of(self, ids: np.ndarray) -> np.ndarray:
        owners: np.ndarray = positions_of(ids, self._positions) // self._block * self.count // self._blocks
        return owners


def positions_of(ids: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    return ids if positions is None else positions[ids].astype(np.int64, copy=False)


class Dealt:
    """Ids, dealt to their owners; those of one owner in their order.

    Attributes: order: int64[n], positions of ids, by owner. counts: int64[owners].
    """

    def __init__(self, owners: np.ndarray, count: int) -> None:
        narrow = owners.astype(np.uint16, copy=False)  # radix sort
        self.order, self.counts = np.argsort(narrow, kind="stable"), np.bincount(narrow, minlength=count)

    def parts(self, values: np.ndarray) -> list[torch.Tensor]:
        """The values of the ids, by owner."""
        return [torch.from_numpy(v) for v in np.split(values[self.order], np.cumsum(self.counts)[:-1])]

    def inverse(self) -> torch.Tensor:
        """int32[n]: where the value of each id is among those of all owners, the first owner's first."""
        inverse = np.empty(len(self.order), np.int32)
        inverse[self.order] = np.arange(len(self.order), dtype=np.int32)
        return torch.from_numpy(inverse)
