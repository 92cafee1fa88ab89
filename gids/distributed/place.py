"""Placement: which devices hold which rows, so that reading features costs least.

Called by gids.distributed and by users. Knows heat, capacities and costs, but neither features nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gids import _core

Rule = Literal["total", "own"]
NOBODY = -1
"""No device holds the row: it comes from the host or from storage."""

_BLOCK = 1 << 20
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
    number of devices, 1 to 64. peer_cost, host_cost: of reading one row from another device, and from the
    host or storage, in any unit; from the device itself it is 0. If peers cost more than the host, none is
    asked.

    Raises ValueError for numbers out of their range.
    """

    holders: NDArray[np.unsignedinteger[Any]]
    device_count: int
    peer_cost: float
    host_cost: float

    def __post_init__(self) -> None:
        _check_costs(self.peer_cost, self.host_cost)
        _check_device_count(self.device_count)
        if self.holders.dtype != _mask_dtype(self.device_count) or self.holders.ndim != 1:
            raise ValueError(
                f"holders of {self.device_count} devices must be {_mask_dtype(self.device_count)}[row_count] "
                f"(got {self.holders.dtype}{list(self.holders.shape)})"
            )

    @classmethod
    def of(
        cls, rows: Sequence[NDArray[np.integer[Any]]], row_count: int, *, peer_cost: float, host_cost: float
    ) -> Placement:
        """The placement in which device d holds rows[d], int[n], each once."""
        _check_device_count(len(rows))
        holders = np.zeros(row_count, _mask_dtype(len(rows)))
        for device, held in enumerate(rows):
            holders[held] |= holders.dtype.type(1 << device)
        return cls(holders, len(rows), peer_cost, host_cost)

    @cached_property
    def devices(self) -> list[NDArray[np.int64]]:
        """The rows of each device: int64[n], ascending."""
        return [np.flatnonzero(self.holds(slice(None), device)) for device in range(self.device_count)]

    def holds(self, ids: NDArray[np.integer[Any]] | slice, device: int) -> NDArray[np.bool_]:
        """Whether a device holds these rows."""
        masks = self.holders[ids]
        return (masks & masks.dtype.type(1 << device)).astype(np.bool_)

    def answering(self, ids: NDArray[np.integer[Any]], device: int) -> NDArray[np.int64]:
        """The device from which `device` reads each of these rows: itself if it holds the row, else the next
        device that does, in a circle, so that requests are spread; -1: no device. Returns int64[n].
        """
        answering = np.full(len(ids), NOBODY, np.int64)
        masks = self.holders[ids]
        left = np.flatnonzero(masks)
        for step in range(self.device_count if self._asks_peers else 1):
            asked = (device + step) % self.device_count
            holds = (masks[left] & masks.dtype.type(1 << asked)).astype(np.bool_)
            answering[left[holds]] = asked
            left = left[~holds]
        return answering

    def moved(self, ids: NDArray[np.integer[Any]], device: int) -> Moved:
        """Where a device reads these rows."""
        masks = self.holders[ids]
        own = int(np.count_nonzero(masks & masks.dtype.type(1 << device)))
        held = int(np.count_nonzero(masks)) if self._asks_peers else own
        return Moved(own, held - own, len(masks) - held)

    def cost(self, moved: Moved) -> float:
        """The cost of reading these rows."""
        return self.peer_cost * moved.peer + self.host_cost * moved.host

    def expected_cost(self, heat: NDArray[Any]) -> float:
        """The mean cost of reading a row, if every device reads rows in proportion to their heat."""
        cost = total = 0.0
        for first in range(0, len(heat), _BLOCK):
            part = np.asarray(heat[first : first + _BLOCK], np.float64)
            masks = self.holders[first : first + _BLOCK]
            copies = np.zeros(len(masks), np.int64)
            for device in range(self.device_count):
                copies += (masks & masks.dtype.type(1 << device)).astype(np.bool_)
            from_peers = (1 - copies / self.device_count) * min(self.peer_cost, self.host_cost)
            cost += float(part @ np.where(copies > 0, from_peers, self.host_cost))
            total += float(part.sum())
        return cost / total if total else 0.0

    @property
    def _asks_peers(self) -> bool:
        return self.peer_cost <= self.host_cost


def place(
    heat: NDArray[Any],
    capacities: Sequence[int],
    peer_cost: float,
    host_cost: float,
    *,
    rule: Rule = "total",
) -> Placement:
    """Choose the rows of each device, so that reading rows costs least.

    heat: number[row_count], how often a row is read relative to others; every device reads alike. capacities:
    rows that fit on each device; 1 to 64 devices. peer_cost, host_cost: of reading one row from another
    device, and from the host or storage, in any unit. If peers are not cheaper than the host, the hottest
    rows are on every device; if they cost nothing, no row is on two devices.

    Starts with the hottest rows on every device. Then rows that no device holds replace copies, the hottest
    new row the coldest copy, as long as this is an advantage; one copy of each row stays. Devices take turns:
    the one that gained least takes the next row. rule: "total": an advantage for all devices together, which
    gives the smallest possible expected cost. "own": for the device that exchanges the row, as published:
    heat(new) x host_cost > heat(old) x peer_cost; the savings of the other devices do not count.

    Equal heats are in the order of the ids, so the result depends only on the arguments. Linear in row_count;
    takes about 24 bytes per row (16 if heat is float32) while it works. Blocks without the GIL.

    Song and Jiang, "Rethinking graph data placement for graph neural network training on multiple GPUs", ICS
    2022, Algorithm 1. As printed, it loses a row whenever it leaves the last copy of another one in place.

    Raises TypeError for heat that is not numbers, ValueError for arguments out of their range.
    """
    heat = _checked(heat)
    _check_device_count(len(capacities))
    _check_costs(peer_cost, host_cost)
    if rule not in ("total", "own"):
        raise ValueError(f"rule={rule!r}: it must be 'total' or 'own'")
    if any(c < 0 for c in capacities):
        raise ValueError(f"capacities={list(capacities)}: each must be 0 or more")
    rows = np.empty(len(heat), np.uint32)
    _core.by_heat(heat, rows)
    holders = np.empty(len(heat), _mask_dtype(len(capacities)))
    limits = [min(int(c), len(heat)) for c in capacities]
    _core.place(rows, heat, limits, worth(len(capacities), peer_cost, host_cost, rule), holders)
    return Placement(holders, len(capacities), peer_cost, host_cost)


def worth(device_count: int, peer_cost: float, host_cost: float, rule: Rule) -> tuple[float, float]:
    """(what the first copy of a row saves, what each further one saves) per access, to compare them."""
    nearer = min(peer_cost, host_cost)  # nobody asks a peer that is slower than the host
    if rule == "own":
        return host_cost, nearer
    # The device that takes the row no longer reads it at all, and the others read it from there.
    return host_cost + (device_count - 1) * (host_cost - nearer), nearer


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


def _check_costs(peer_cost: float, host_cost: float) -> None:
    if not (0 <= peer_cost < np.inf and 0 <= host_cost < np.inf):
        raise ValueError(
            f"peer_cost and host_cost must be 0 or more, and finite (got {peer_cost} and {host_cost})"
        )


def _check_device_count(count: int) -> None:
    if not 1 <= count <= _core.MAX_DEVICES:
        raise ValueError(f"a placement has 1 to {_core.MAX_DEVICES} devices (got {count})")


def _mask_dtype(device_count: int) -> np.dtype[Any]:
    bits = next(bits for bits in (8, 16, 32, 64) if device_count <= bits)
    return np.dtype(f"uint{bits}")
