"""OnDevice: what packs need to know of a GPU, and copies of what was sampled there.

Made by FeatureLoader for device="cuda". PackChooser asks it for the memory of packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gids.cuda.device import MadeOn, on_host
from gids.packs.device_rows import DeviceRows
from gids.packs.memory import ON_DEVICE, PackPlan, numbers_of
from gids.packs.row_memory import HostGather
from gids.packs.spaces import Space

if TYPE_CHECKING:
    from gids.cuda.device import Device

T = TypeVar("T")


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

    def rows(
        self,
        host: HostGather,
        spaces: Sequence[Space],
        plan: PackPlan,
        *,
        output_dtype: torch.dtype | None,
        output_rows: Mapping[str, int],
    ) -> DeviceRows:
        """The memory of packs. Raises MemoryBudgetError."""
        return DeviceRows(
            self._device,
            host,
            spaces,
            pack_bytes=plan.pack_bytes,
            staging_bytes=plan.staging_bytes,
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
