"""Owners: which rank has the row of an id. Called by the exchanges. PlacedOwners, made by GroupSource: the
hottest pages have several owners, as a placement says.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from gids.distributed.place import NOBODY, Placement, place
from gids.io import queue_depth
from gids.io.speed import measure_speed
from gids.loader.options import Options
from gids.loader.ranks import Group, Tensors
from gids.store import Table

# 2^64 / the golden ratio: multiplicative hashing. Hash tables take another hash: native/include/gids/mix.h.
_PRIME = np.uint64(0x9E3779B97F4A7C15)

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


_SHARE = 0.5
"""Of each rank's lines, for placed pages, which are never evicted. The rest is for what the window asks."""
_TRIALS = 5
_TRIAL_BYTES = 1 << 20
_READ_BYTES = 16 << 20


class PlacedOwners:
    """The owner of a row is this rank if it holds a copy of its page, else the rank that answers for it.

    placement: of pages. rest: the owners of rows on pages that no rank holds a copy of. rows_per_page,
    positions: of the table; positions: Table.order, or None.
    """

    def __init__(
        self, placement: Placement, rank: int, rest: Owners, rows_per_page: int, positions: np.ndarray | None
    ) -> None:
        self._placement, self._rank, self._rest = placement, rank, rest
        self._rows_per_page, self._positions = rows_per_page, positions
        self.held = placement.holds(slice(None), rank)
        """bool[page_count]: the pages of which this rank holds a copy."""

    def seen_by(self, rank: int) -> PlacedOwners:
        """The owners for another rank."""
        return PlacedOwners(self._placement, rank, self._rest, self._rows_per_page, self._positions)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        at = positions_of(ids, self._positions)
        owners = self._placement.answering(at // self._rows_per_page, self._rank)
        free = np.flatnonzero(owners == NOBODY)
        owners[free] = self._rest(ids[free])
        return owners


def placed_owners(
    group: Group, table: Table, weights: np.ndarray, memory_bytes: int, options: Options, rest: Owners
) -> PlacedOwners:
    """Owners of a table's rows by the heat of its pages, and by what it costs to move one. Collective.

    weights: float32[page_count]. memory_bytes: of this rank, for lines of this table. rest: of other pages.
    """
    peer_s, host_s = _seconds_per_page(group, table, options)
    mine = peer_s, host_s, int(_SHARE * memory_bytes) // table.page_bytes
    told = group.gather(lambda: mine, f"places pages of {table.name}")
    placement = place(
        weights,
        [pages for _, _, pages in told],
        peer_cost=sum(peer for peer, _, _ in told) / group.size,
        host_cost=sum(host for _, host, _ in told) / group.size,
    )
    return PlacedOwners(placement, group.rank, rest, table.rows_per_page, table.order)


def _seconds_per_page(group: Group, table: Table, options: Options) -> tuple[float, float]:
    """Seconds to get a page from another rank, and from the disk, while all ranks do the same. Collective."""
    disk_s = 0.0

    def measure() -> Tensors:
        nonlocal disk_s
        disk_s = _random_page_s(table, options)  # not known_speed(): a disk may serve several ranks at once
        return []

    # If a rank cannot read, all of them hear of it.
    group.exchange(measure, [], f"measures the costs of pages of {table.name}")
    each = max(1, _TRIAL_BYTES // table.page_bytes)
    rows = torch.zeros(each * group.size, table.page_bytes, dtype=torch.uint8)
    counts, taken = [each] * group.size, []
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        _, handle = group.start_rows(rows, counts, counts)
        group.wait_for(handle)
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken)) / len(rows), disk_s


def _random_page_s(table: Table, options: Options) -> float:
    """Seconds of a page's random read, while as many are read as may be in flight. Raises OSError."""
    depth = options.queue_depth or queue_depth(table.shards, options.engine)
    speed = measure_speed(
        table.shards,
        table.page_bytes,
        options.engine,
        depth=depth,
        direct=options.direct,
        most_bytes=_READ_BYTES,
    )
    return 1 / max(1.0, speed.reads_per_s)
