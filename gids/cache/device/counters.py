"""Counters of the cache in device memory. Kernels count there; the host reads a copy after an event.

Called by DeviceFeatureCache. A live step's counters have the index step % USE_BITS; the counters of reading
through have the index THROUGH.
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

COUNTERS: dict[str, int] = _core.DEVICE_COUNTERS
"""The word of each counter in a device::Counters."""

WORDS: int = _core.DEVICE_COUNTER_WORDS
"""Words of a device::Counters."""

THROUGH = _core.USE_BITS
"""The index of reading through, after the indices of the live steps."""

_MISSES = COUNTERS["misses"]
_ALL_BITS = (1 << 64) - 1


class Counters:
    """A device::Counters for every index and table. Allocated on torch's current stream."""

    def __init__(self, device: Device, kernels: CacheKernels, tables: Sequence[str]) -> None:
        self._kernels = kernels
        self._number = {name: i for i, name in enumerate(tables)}
        self._there = device.zeros((THROUGH + 1, len(tables), WORDS), torch.int64)
        self.shown = HostArray(device, self._there.nbytes)
        # Made once, as a view costs as much as a launch.
        self._views: list[list[torch.Tensor]] = [list(index) for index in self._there]
        self._sums = {name: dict.fromkeys(("steps", *COUNTERS), 0) for name in tables}

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self._there.nbytes

    def of(self, index: int, table: str) -> torch.Tensor:
        """int64[WORDS] on the device: the Counters that kernels take."""
        return self._views[index][self._number[table]]

    def misses(self, index: int, table: str) -> torch.Tensor:
        """int64[1] on the device."""
        return self._views[index][self._number[table]][_MISSES : _MISSES + 1]

    def shown_at(self, index: int, table: str) -> int:
        """The address, for kernels, of the host's copy of a table's counters."""
        first = self.shown.address + index * self._there[index].nbytes
        return first + self._number[table] * WORDS * 8

    def show(self, index: int) -> None:
        """Enqueue the copy of an index's counters, of all tables, to the host."""
        self._kernels.show(self._there[index], self.shown.address + index * self._there[index].nbytes)

    def seen(self, index: int, table: str, counter: str) -> int:
        """The counter when show() ran. The caller has waited for an event after it."""
        return int(self._seen(index, table)[COUNTERS[counter]])

    def add(self, index: int) -> None:
        """Add a step's counters of all tables, as shown, to the sums."""
        for table, sums in self._sums.items():
            sums["steps"] += 1
            seen = self._seen(index, table)
            for counter, word in COUNTERS.items():
                sums[counter] += int(seen[word])

    def sums(self, table: str) -> dict[str, int]:
        """The sums of the added steps, by the names that FeatureCache uses."""
        sums = dict(self._sums[table])
        sums["hits"] = sums["pages"] - sums["misses"]
        del sums["bad"], sums["unresolved"]
        return sums

    def bad_id(
        self, index: int, ids: Mapping[str, torch.Tensor], rows: Mapping[str, int]
    ) -> IndexError | None:
        """The error for the first id out of range, if the counters shown have one."""
        for table, tensor in ids.items():
            if bad := self.seen(index, table, "bad"):
                position = ~bad & _ALL_BITS
                where = f"id {int(tensor[position])} at position {position}"
                return IndexError(
                    f"table '{table}': {where} is out of range for a table of {rows[table]} rows"
                )
        return None

    def _seen(self, index: int, table: str) -> npt.NDArray[np.uint64]:
        words = self.shown.bytes.view(np.uint64).reshape(THROUGH + 1, -1, WORDS)
        counters: npt.NDArray[np.uint64] = words[index, self._number[table]]
        return counters
