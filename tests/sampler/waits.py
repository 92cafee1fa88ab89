"""An emulated device that records when the host asks for sizes, and when it waits for them."""

from __future__ import annotations

import torch
from emulator import EmulatedDevice, EmulatedEvent


class Waits(EmulatedDevice):
    """Records each copy of sizes to the host and each wait for one, by the number of the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, int]] = []
        self.copies: list[torch.Tensor] = []

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, EmulatedEvent]:
        copy, event = super().to_host(tensor)
        number = len(self.copies)
        self.copies.append(copy)
        self.said.append(("copy", number))

        def synchronize() -> None:
            self.said.append(("wait", number))
            event.enqueue()

        event.synchronize = synchronize  # type: ignore[method-assign]
        return copy, event
