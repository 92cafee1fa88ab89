"""Counters of the cache in device memory: kernels count there, and the host sees a copy after an event.

Called by DeviceFeatureCache. A place is that of a live step, step mod 24, or the last: reading through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gids import _core
from gids.cache.device.state import HostArray

if TYPE_CHECKING:
    from gids.cache.device.kernels import CacheKernels
    from gids.cuda.device import Device

COUNTERS = ("pages", "bad", "misses", "coalesced", "loads", "bypasses", "evictions", "failures", "unresolved")
"""The first words of a device::Counters."""

WORDS = 16
"""Words of a device::Counters."""

THROUGH = _core.USE_BITS
"""The place of reading through."""

_MISSES = COUNTERS.index("misses")
_ALL_BITS = (1 << 64) - 1


class Counters:
    """device::Counters of every place and table. Allocated on torch's current stream."""

    def __init__(self, device: Device, kernels: CacheKernels, tables: Sequence[str]) -> None:
        self._kernels = kernels
        self._number = {name: i for i, name in enumerate(tables)}
        self._there = device.zeros((THROUGH + 1, len(tables), WORDS), torch.int64)
        self.shown = HostArray(device, self._there.nbytes)
        # Made once: a view costs as much as a launch.
        self._views: list[list[torch.Tensor]] = [list(place) for place in self._there]
        self._sums = {name: dict.fromkeys(("steps", *COUNTERS), 0) for name in tables}

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self._there.nbytes

    def of(self, place: int, table: str) -> torch.Tensor:
        """int64[WORDS] on the device: what kernels take as Counters."""
        return self._views[place][self._number[table]]

    def misses(self, place: int, table: str) -> torch.Tensor:
        """int64[1] on the device."""
        return self._views[place][self._number[table]][_MISSES : _MISSES + 1]

    def show(self, place: int) -> None:
        """Enqueue the copy to the host of a place, all tables."""
        self._kernels.show(self._there[place], self.shown.address + place * self._there[place].nbytes)

    def seen(self, place: int, table: str, counter: str) -> int:
        """As it was when show() ran; the caller has waited for an event behind it."""
        return int(self._seen(place, table)[COUNTERS.index(counter)])

    def add(self, place: int) -> None:
        """Count a step of all tables, from what is seen."""
        for table, sums in self._sums.items():
            sums["steps"] += 1
            for counter, value in zip(COUNTERS, self._seen(place, table), strict=False):
                sums[counter] += int(value)

    def sums(self, table: str) -> dict[str, int]:
        """Over the steps counted, by the names that the cache in host memory has."""
        sums = dict(self._sums[table])
        sums["hits"] = sums["pages"] - sums["misses"]
        del sums["bad"], sums["unresolved"]
        return sums

    def bad_id(
        self, place: int, ids: Mapping[str, torch.Tensor], rows: Mapping[str, int]
    ) -> IndexError | None:
        """The error for the first id of the first table that has one out of range, from what is seen."""
        for table, tensor in ids.items():
            if bad := self.seen(place, table, "bad"):
                position = ~bad & _ALL_BITS
                where = f"id {int(tensor[position])} at position {position}"
                return IndexError(
                    f"table '{table}': {where} is out of range for a table of {rows[table]} rows"
                )
        return None

    def _seen(self, place: int, table: str) -> npt.NDArray[np.uint64]:
        words = self.shown.bytes.view(np.uint64).reshape(THROUGH + 1, -1, WORDS)
        counters: npt.NDArray[np.uint64] = words[place, self._number[table]]
        return counters
