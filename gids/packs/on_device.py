"""OnDevice: what packs need to know of a GPU: its memory budget, and copies of what was sampled there.

Made by FeatureLoader for device="cuda". PackReads asks it for the budget and for the memory of packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gids.cuda.device import MadeOn, on_host
from gids.packs.device_rows import OUTPUTS, SENT, DeviceRows
from gids.packs.memory import ALIGNMENT, LEAST_WRITE_BYTES, SETS_OF_A_TRIAL, Ahead, PackBudget, PackPlan
from gids.packs.row_memory import HostGather
from gids.packs.spaces import Space
from gids.store.geometry import align_up, div_ceil

if TYPE_CHECKING:
    from gids.cuda.device import Device

T = TypeVar("T")

_MINIBATCHES = 4
"""On the device: one is sampled, one goes to the spool, one comes from there, one is with the consumer."""

_SETS = 3
"""Row sets on the device: of the resident rows and of two packs."""

_MOST_STAGING = 64 << 20
_LEAST_STAGING = 256 << 10
_STAGING_SHARE = 32
"""Staging takes at most a 32nd of the host memory."""

_STAGED_DISKS = 4
"""The most staging has room for what is in flight on four disks, and grows with their number."""

ON_DEVICE = ("packs", "outputs", "row sets on the device", "rows on the device", "minibatches on the device")
"""The purposes in device memory. All others are in host memory."""


@dataclass(frozen=True)
class DevicePackPlan(PackPlan):
    """How both memories are shared out. "packs" is device memory, and has no row lists or write buffers."""

    def rows_bytes(self, lists_bytes: int) -> int:
        """See PackPlan.rows_bytes()."""
        return self.pack_bytes

    def lists_bytes(self, wanted_bytes: int) -> int:
        """See PackPlan.lists_bytes()."""
        return self.purposes["row lists"] // (2 if self.overlap else 1)

    def write_bytes(self, half_bytes: int, outputs_bytes: int = 0) -> int:
        """See PackPlan.write_bytes()."""
        return self.purposes["write buffers"]


@dataclass(frozen=True, kw_only=True)
class DevicePackBudget(PackBudget):
    """What packs on a device may take: memory_bytes of host memory, and device_bytes there."""

    device_bytes: int

    def needed(self, rows: Mapping[str, int], minibatch_bytes: int, ahead: Ahead) -> dict[str, int]:
        """Bytes by purpose in both memories, without packs, row lists and write buffers."""
        purposes = super().needed(rows, minibatch_bytes, ahead)
        purposes.pop("write buffers", None)
        numbers = 4 * numbers_of(self.spaces, rows)
        return {
            **purposes,
            "counts": self._counts_bytes,
            "staging": self.staging_bytes + SENT * numbers,
            "outputs": OUTPUTS * self._output_bytes(rows),
            "row sets on the device": _SETS * self._set_bytes,
            "rows on the device": SENT * numbers,
            "minibatches on the device": _MINIBATCHES * minibatch_bytes,
        }

    @property
    def staging_bytes(self) -> int:
        """Pinned host memory that packs pass."""
        share = max(_LEAST_STAGING, self.memory_bytes // _STAGING_SHARE)
        most = _MOST_STAGING * max(1, div_ceil(self._busy_disks, _STAGED_DISKS))
        return align_up(min(most, share), ALIGNMENT)

    def _plan(self, purposes: Mapping[str, int], ahead: Ahead) -> PackPlan | None:
        on_device = sum(n for purpose, n in purposes.items() if purpose in ON_DEVICE)
        left = self.device_bytes - on_device
        left_on_host = self.memory_bytes - (sum(purposes.values()) - on_device)
        lists_bytes = left_on_host // 2
        write_bytes = left_on_host - lists_bytes
        # Cuts are tried before there are write buffers.
        trials = write_bytes // (SETS_OF_A_TRIAL * self._set_bytes)
        if left <= 0 or trials <= 0 or write_bytes < LEAST_WRITE_BYTES:
            return None
        return DevicePackPlan(
            {**purposes, "row lists": lists_bytes, "write buffers": write_bytes, "packs": left},
            ahead=ahead,
            trials=trials,
            piece_bytes=self._piece_bytes,
            read_bytes=self._read_bytes,
            disks=self._busy_disks,
        )


class HostCopies:
    """Copies what was sampled on a device to the host.

    Its stream waits for training only if the minibatch was made on torch's current stream, as training is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()
        self._complete = False  # the minibatch whose ids were copied last

    def ids(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Ids of a minibatch on the CPU. Blocks until they are there.

        Tables that have the same tensor have the same copy.
        """
        self._complete = isinstance(ids, MadeOn)
        return on_host(ids)

    def use(self) -> AbstractContextManager[object]:
        """A context in which torch copies tensors of the minibatch whose ids were copied last."""
        if not self._complete:
            self._stream.wait_stream(self._device.current_stream())
        return self._device.use(self._stream)


class OnDevice:
    """memory_bytes: of the device, for packs and outputs. Lasts as long as the loader.

    Attributes: copies; without_kvikio: whether kvikio has failed. It is not tried again then.
    """

    def __init__(self, device: Device, memory_bytes: int) -> None:
        self._device, self.memory_bytes = device, memory_bytes
        self.copies = HostCopies(device)
        self.without_kvikio = False

    def budget(self, **host: Any) -> DevicePackBudget:
        """host: the arguments of PackBudget."""
        return DevicePackBudget(**host, device_bytes=self.memory_bytes)

    def rows(
        self,
        host: HostGather,
        spaces: Sequence[Space],
        plan: PackPlan,
        budget: PackBudget,
        *,
        output_dtype: torch.dtype | None,
        output_rows: Mapping[str, int],
    ) -> DeviceRows:
        """The memory of packs. budget: that made the plan. Raises MemoryBudgetError."""
        assert isinstance(budget, DevicePackBudget)
        return DeviceRows(
            self._device,
            host,
            spaces,
            pack_bytes=plan.pack_bytes,
            staging_bytes=budget.staging_bytes,
            output_dtype=output_dtype,
            most_rows=numbers_of(spaces, output_rows),
            purposes={purpose: n for purpose, n in plan.purposes.items() if purpose in ON_DEVICE},
            on=self,
        )

    def ids_of(self, ids_of: Callable[[T], Mapping[str, torch.Tensor]]) -> Callable[[T], Any]:
        """A function that returns the ids of a minibatch on the CPU."""
        return lambda minibatch: self.copies.ids(ids_of(minibatch))

    def settle(self) -> None:
        """Wait for torch's current stream, on which minibatches come from the spool."""
        self._device.current_stream().synchronize()

    def settled(self, minibatches: Iterable[T]) -> Iterator[T]:
        """The minibatches, each complete for every stream."""
        for minibatch in minibatches:
            self.settle()
            yield minibatch


def numbers_of(spaces: Sequence[Space], rows: Mapping[str, int]) -> int:
    """Row numbers that a minibatch has. rows: that it reads, by table."""
    return sum(max(rows.get(t.name, 0) for t in space.tables) for space in spaces)
