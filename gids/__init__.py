"""Out-of-core feature loading for graph neural networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gids.errors import FormatError, MemoryBudgetError, MissingError, StorageError
    from gids.loader import EdgeLoader, FeatureLoader, NodeLoader
    from gids.store import FeatureStore

__all__ = [
    "EdgeLoader",
    "FeatureLoader",
    "FeatureStore",
    "FormatError",
    "MemoryBudgetError",
    "MissingError",
    "NodeLoader",
    "StorageError",
]

_HOMES = {
    "EdgeLoader": "gids.loader",
    "FeatureLoader": "gids.loader",
    "FeatureStore": "gids.store",
    "FormatError": "gids.errors",
    "MemoryBudgetError": "gids.errors",
    "MissingError": "gids.errors",
    "NodeLoader": "gids.loader",
    "StorageError": "gids.errors",
}


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module 'gids' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
