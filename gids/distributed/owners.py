"""Owners: which rank has the row of an id. Called by the exchanges; knows arrays only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

_PRIME = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio: multiplicative hashing


Owners = Callable[[np.ndarray], np.ndarray]
"""Returns the owners of ids, int64[n]: whole numbers[n]."""


def hash_owners(count: int, block: int = 1, positions: np.ndarray | None = None) -> Owners:
    """Blocks of `block` successive ids are spread evenly over the owners: a page's rows have one owner.

    positions: the position of each id, or None; blocks are of positions then.
    """

    def owners(ids: np.ndarray) -> np.ndarray:
        mixed = (positions_of(ids, positions) // block).astype(np.uint64) * _PRIME
        return ((mixed >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)

    return owners


def range_owners(count: int, id_count: int, block: int = 1, positions: np.ndarray | None = None) -> Owners:
    """Each owner has successive ids, equally many but for blocks of `block` ids, which have one owner.

    positions: as of hash_owners().
    """
    blocks = max(1, -(-id_count // block))

    def owners(ids: np.ndarray) -> np.ndarray:
        of_ids: np.ndarray = positions_of(ids, positions) // block * count // blocks
        return of_ids

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
