"""A stand-in for torch's allocator of pinned memory and its current stream, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class HostAllocator:
    """Attributes: sizes: bytes of each block that torch.empty() took. copied: bytes of each tensor that
    pin_memory() copied. recorded, awaited: numbers of the current stream's events.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.copied: list[int] = []
        self.recorded: list[int] = []
        self.awaited: list[int] = []
        self._blocks: list[torch.Tensor] = []  # kept, so that no other memory gets their addresses
        self._empty = torch.empty

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all of it is in pinned memory."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = (b.data_ptr() <= begin and end <= b.data_ptr() + b.nbytes for b in self._blocks)
        return tensor.nbytes == 0 or any(inside)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = self._empty(*size, **options)
        if pin_memory:
            self.sizes.append(made.nbytes)
            self._blocks.append(made)
        return made

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_pinned(tensor):
            return tensor
        self.copied.append(tensor.nbytes)
        self._blocks.append(tensor.clone())
        return self._blocks[-1].view_as(tensor)

    def record_event(self, event: int) -> Any:
        self.recorded.append(event)
        return SimpleNamespace(synchronize=lambda: self.awaited.append(event))

    def replace_torchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = iter(range(1 << 30))
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: next(numbers))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
