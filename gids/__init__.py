"""Out-of-core feature loading for graph neural networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gids.errors import FormatError, StorageError
    from gids.store import FeatureStore

__all__ = ["FeatureStore", "FormatError", "StorageError"]

_HOMES = {"FeatureStore": "gids.store", "FormatError": "gids.errors", "StorageError": "gids.errors"}


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    if name not in _HOMES:
        raise AttributeError(f"module 'gids' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
