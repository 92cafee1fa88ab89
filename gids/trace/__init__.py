"""Record which pages a training run reads, and replay the trace in a cache of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gids.trace.recording import record
    from gids.trace.trace_file import Trace

__all__ = ["Trace", "record"]

_HOMES = {"record": "gids.trace.recording", "Trace": "gids.trace.trace_file"}


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module 'gids.trace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
