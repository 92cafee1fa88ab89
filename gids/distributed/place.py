"""Placement: which devices hold which rows, so that reading features costs least.

Called by gids.distributed and by users. Knows heat, capacities and costs, but neither features nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gids import _core

Costs = NDArray[np.float64]
"""float64[devices, devices]: [i, j] is what device i pays for a row in the memory of device j."""

Rule = Literal["total", "own"]
NOBODY = -1
"""No device holds the row: it comes from the host or from storage."""

_BLOCK = 1 << 20
_LEAST_GAIN = 1e-9
"""Devices settle when none can save more than this share of what its rows save."""

_MAX_ROWS = (1 << 32) - 1


class Moved(NamedTuple):
    """How many of the rows that a device reads come from where."""

    own: int
    peer: int
    host: int


@dataclass(frozen=True)
class Placement:
    """Which devices hold which rows.

    holders: uint8, uint16, uint32 or uint64[row_count]; bit d is set if device d holds the row. device_count:
    number of devices, 1 to 64. peer_cost, host_cost: as of place(). A peer that costs more than the host is
    not asked.

    Raises as place() for wrong costs, ValueError for other numbers out of their range.
    """

    holders: NDArray[np.unsignedinteger[Any]]
    device_count: int
    peer_cost: float | ArrayLike
    host_cost: float

    def __post_init__(self) -> None:
        dtype = _mask_dtype(self.device_count)
        assert self.costs.shape == (self.device_count, self.device_count)  # which checks them
        if self.holders.dtype != dtype or self.holders.ndim != 1:
            raise ValueError(
                f"holders of {self.device_count} devices must be {dtype}[row_count] (got "
                f"{self.holders.dtype}{list(self.holders.shape)})"
            )

    @classmethod
    def of(
        cls,
        rows: Sequence[NDArray[np.integer[Any]]],
        row_count: int,
        *,
        peer_cost: float | ArrayLike,
        host_cost: float,
    ) -> Placement:
        """The placement in which device d holds rows[d], int[n], each once."""
        holders = np.zeros(row_count, _mask_dtype(len(rows)))
        for device, held in enumerate(rows):
            holders[held] |= holders.dtype.type(1 << device)
        return cls(holders, len(rows), peer_cost, host_cost)

    @cached_property
    def costs(self) -> Costs:
        """peer_cost as a matrix: float64[devices, devices]. A number is the cost of every other device."""
        return _costs(self.peer_cost, self.host_cost, self.device_count)

    @cached_property
    def devices(self) -> list[NDArray[np.int64]]:
        """The rows of each device: int64[n], ascending."""
        return [np.flatnonzero(self.holds(slice(None), device)) for device in range(self.device_count)]

    def holds(self, ids: NDArray[np.integer[Any]] | slice, device: int) -> NDArray[np.bool_]:
        """Whether a device holds these rows."""
        masks = self.holders[ids]
        return (masks & masks.dtype.type(1 << device)).astype(np.bool_)

    def answering(self, ids: NDArray[np.integer[Any]] | slice, device: int) -> NDArray[np.int64]:
        """The device from which `device` reads each of these rows: itself if it holds the row, else the
        cheapest device that does; of several, the next one in a circle, so that requests are spread; -1: no
        device. Returns int64[n].
        """
        masks, costs, count = self.holders[ids], self.costs[device], self.device_count
        answering = np.full(len(masks), NOBODY, np.int64)
        left = np.flatnonzero(masks)
        for asked in sorted(range(count), key=lambda d: (costs[d], (d - device) % count)):
            if costs[asked] > self.host_cost or not len(left):
                break
            holds = (masks[left] & masks.dtype.type(1 << asked)).astype(np.bool_)
            answering[left[holds]] = asked
            left = left[~holds]
        return answering

    def row_costs(self, ids: NDArray[np.integer[Any]] | slice, device: int) -> NDArray[np.float64]:
        """What each of these rows costs a device: float64[n]."""
        costs: NDArray[np.float64] = np.append(self.costs[device], self.host_cost)[
            self.answering(ids, device)
        ]
        return costs

    def within(self, most_cost: float) -> list[NDArray[np.bool_]]:
        """By device, the rows that cost it at most this: bool[row_count], for gids.sampler.LocalityBias.

        0: those in its own memory, if that costs nothing. More: also those of the cheapest peers.
        """
        return [self.row_costs(slice(None), device) <= most_cost for device in range(self.device_count)]

    def moved(self, ids: NDArray[np.integer[Any]], device: int) -> Moved:
        """Where a device reads these rows."""
        answering = self.answering(ids, device)
        own, host = int(np.count_nonzero(answering == device)), int(np.count_nonzero(answering == NOBODY))
        return Moved(own, len(answering) - own - host, host)

    def expected_cost(self, heat: NDArray[Any]) -> float:
        """The mean cost of reading a row, if every device reads rows in proportion to their heat."""
        cost = total = 0.0
        for first in range(0, len(heat), _BLOCK):
            part = np.asarray(heat[first : first + _BLOCK], np.float64)
            for device in range(self.device_count):
                cost += float(part @ self.row_costs(slice(first, first + _BLOCK), device))
            total += float(part.sum()) * self.device_count
        return cost / total if total else 0.0


def place(
    heat: NDArray[Any],
    capacities: Sequence[int],
    peer_cost: float | ArrayLike,
    host_cost: float,
    *,
    rule: Rule = "total",
) -> Placement:
    """Choose the rows of each device, so that reading rows costs least.

    heat: number[row_count], how often a row is read relative to others; every device reads alike. capacities:
    rows that fit on each device; 1 to 64 devices. peer_cost, host_cost: of reading one row from another
    device, and from the host or storage, in any unit. If peers are not cheaper than the host, the hottest
    rows are on every device; if they cost nothing, no row is on two devices.

    peer_cost may be a matrix, float[devices, devices], if links differ: peer_cost[i, j] is what a row in the
    memory of device j costs device i. The diagonal, a device's own memory, is 0 or more, and at most the
    other costs of its row and host_cost.

    Starts with the hottest rows on every device. Then rows that no device holds replace copies, the hottest
    new row the coldest copy, as long as this is an advantage; one copy of each row stays. Devices take turns:
    the one that gained least takes the next row. rule: "total": an advantage for all devices together, which
    gives the smallest possible expected cost. "own": for the device that exchanges the row, as published:
    heat(new) x host_cost > heat(old) x peer_cost; the savings of the other devices do not count.

    If costs of peers differ, begins with the placements for peers that cost nothing, the mean, or as much as
    the host, and with empty devices. In each, one device after the other takes the rows that save all devices
    most, given what the others hold, until none can save more; the cheapest result is returned. It costs at
    most what these placements do, and saves, compared with reading all rows from the host, at least half of
    what the best of all placements saves: a copy saves less, the more copies there are (Vetta, "Nash
    equilibria in competitive societies", FOCS 2002). Takes seconds per million rows with 4 devices, about
    twice as long with twice as many, and minutes with 64; rule must be "total".

    Equal heats are in the order of the ids, so the result depends only on the arguments. With one cost for
    all peers, linear in row_count; takes about 24 bytes per row (16 if heat is float32) while it works, and
    blocks without the GIL.

    Song and Jiang, "Rethinking graph data placement for graph neural network training on multiple GPUs", ICS
    2022, Algorithm 1. As printed, it loses a row whenever it leaves the last copy of another one in place.

    Raises TypeError for heat or costs that are not numbers, ValueError for arguments out of their range.
    """
    heat = _checked(heat)
    count = len(capacities)
    dtype = _mask_dtype(count)
    costs = _costs(peer_cost, host_cost, count)
    if rule not in ("total", "own"):
        raise ValueError(f"rule={rule!r}: it must be 'total' or 'own'")
    if any(c < 0 for c in capacities):
        raise ValueError(f"capacities={list(capacities)}: each must be 0 or more")
    rows = np.empty(len(heat), np.uint32)
    _core.by_heat(heat, rows)
    limits = [min(int(c), len(heat)) for c in capacities]

    def for_one_cost(peer: float, host: float) -> NDArray[Any]:
        holders = np.empty(len(heat), dtype)
        _core.place(rows, heat, limits, worth(count, peer, host, rule), holders)
        return holders

    own, peers = costs.diagonal(), costs[~np.eye(count, dtype=np.bool_)]
    if (own == own[0]).all() and (peers == peers[:1]).all():
        peer = float(peers[0] - own[0]) if len(peers) else 0.0
        return Placement(for_one_cost(peer, host_cost - float(own[0])), count, peer_cost, host_cost)
    if rule == "own":
        raise ValueError("rule='own' takes one peer_cost for all devices: use rule='total' with a matrix")
    starts = [for_one_cost(peer, host_cost) for peer in (0.0, float(peers.mean()), host_cost)]
    starts.append(np.zeros_like(starts[0]))
    near = rows[: sum(limits)]  # in the best placement no row is held while a hotter one is not
    for holders in starts:
        holders[near] = _settled(holders[near], heat[near].astype(np.float64), limits, costs, host_cost)
    placements = [Placement(holders, count, peer_cost, host_cost) for holders in starts]
    return min(placements, key=lambda placement: placement.expected_cost(heat))


def worth(device_count: int, peer_cost: float, host_cost: float, rule: Rule) -> tuple[float, float]:
    """(what the first copy of a row saves, what each further one saves) per access, to compare them."""
    nearer = min(peer_cost, host_cost)  # nobody asks a peer that is slower than the host
    if rule == "own":
        return host_cost, nearer
    # The device that takes the row no longer reads it at all, and the others read it from there.
    return host_cost + (device_count - 1) * (host_cost - nearer), nearer


def _settled(
    holders: NDArray[Any], heat: NDArray[np.float64], limits: Sequence[int], costs: Costs, host_cost: float
) -> NDArray[Any]:
    """Holders of rows, changed until no device alone can save more by holding other rows."""
    changed = True
    while changed:
        changed = False
        for device, limit in enumerate(limits):
            bit = holders.dtype.type(1 << device)
            others = holders & ~bit
            saves = heat * _saves(others, device, costs, host_cost)
            chosen = _greatest(saves, limit)
            if saves[chosen].sum() > saves[holders != others].sum() * (1 + _LEAST_GAIN):
                holders, changed = np.where(chosen, others | bit, others), True
    return holders


def _saves(holders: NDArray[Any], device: int, costs: Costs, host_cost: float) -> NDArray[np.float64]:
    """What a copy on a device saves all devices per access, for rows with these other holders: float64[n]."""
    if holders.dtype == np.uint8:
        kinds, kind = np.arange(256, dtype=np.uint8), holders
    else:
        kinds, kind = np.unique(holders, return_inverse=True)
    saves = np.zeros(len(kinds))
    for reader in costs:
        pays = np.full(len(kinds), host_cost)
        for holder, cost in enumerate(reader):
            held = (kinds & kinds.dtype.type(1 << holder)).astype(np.bool_)
            pays[held] = np.minimum(pays[held], cost)
        saves += np.maximum(pays - reader[device], 0)
    of_rows: NDArray[np.float64] = saves[kind]
    return of_rows


def _greatest(values: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Which are the `count` greatest, at most len(values); of equal ones the first."""
    if not count:
        return np.zeros(len(values), np.bool_)
    least = np.partition(values, len(values) - count)[len(values) - count]
    chosen: NDArray[np.bool_] = values > least
    chosen[np.flatnonzero(values == least)[: count - np.count_nonzero(chosen)]] = True
    return chosen


def _checked(heat: NDArray[Any]) -> NDArray[Any]:
    heat = np.asarray(heat)
    if heat.ndim != 1 or heat.dtype.kind not in "biuf" or len(heat) > _MAX_ROWS:
        raise TypeError(
            f"heat must be numbers in one dimension, at most {_MAX_ROWS} (got {heat.dtype}{list(heat.shape)})"
        )
    if heat.dtype not in (np.float32, np.float64):
        heat = heat.astype(np.float64)
    if len(heat) and not (heat.min() >= 0 and heat.max() < np.inf):
        raise ValueError(f"heat must be 0 or more, and finite (got {heat.min()} to {heat.max()})")
    return np.ascontiguousarray(heat)


def _costs(peer_cost: float | ArrayLike, host_cost: float, count: int) -> Costs:
    """What each device pays for a row of each device. Raises TypeError, ValueError."""
    try:
        peers, host = np.asarray(peer_cost), np.asarray(host_cost)
    except ValueError:  # rows of different lengths
        peers = host = np.empty(0, object)
    if peers.dtype.kind not in "biuf" or host.dtype.kind not in "biuf" or host.ndim:
        raise TypeError(
            "peer_cost must be a number, or a matrix of numbers, and host_cost a number (got "
            f"{peer_cost!r} and {host_cost!r})"
        )
    if peers.ndim and peers.shape != (count, count):
        raise ValueError(
            f"peer_cost must be a number, or a matrix [{count}, {count}] of the {count} devices (got "
            f"{list(peers.shape)})"
        )
    every = np.append(peers, host)
    if not (np.isfinite(every) & (every >= 0)).all():
        raise ValueError(f"costs must be 0 or more, and finite (got {peer_cost!r} and {host_cost!r})")
    costs = peers.astype(np.float64) if peers.ndim else np.where(np.eye(count, dtype=np.bool_), 0.0, peers)
    if (costs.diagonal() > np.minimum(costs.min(1), host_cost)).any():
        raise ValueError(
            "peer_cost[i, i], of a device's own memory, must be at most the other costs of its row and "
            f"host_cost (got {peer_cost!r} and {host_cost!r})"
        )
    return costs


def _mask_dtype(device_count: int) -> np.dtype[Any]:
    """Raises ValueError for a number of devices that no mask has bits for."""
    if not 1 <= device_count <= _core.MAX_DEVICES:
        raise ValueError(f"a placement has 1 to {_core.MAX_DEVICES} devices (got {device_count})")
    return np.dtype(f"uint{next(bits for bits in (8, 16, 32, 64) if device_count <= bits)}")
