"""A scratch disk that fills up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from gids.packs import ScratchFull


def fail_at(monkeypatch: pytest.MonkeyPatch, of: type, name: str, turn: int) -> None:
    """The method finds the disk full, from the turn-th call on."""
    original: Callable[..., Any] = getattr(of, name)
    calls = 0

    def method(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= turn:
            raise ScratchFull(errno.ENOSPC, "no room", "somewhere")
        return original(self, *args, **options)

    monkeypatch.setattr(of, name, method)
