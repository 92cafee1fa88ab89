"""Out-of-core feature loading for graph neural networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gids import dgl_finder

if TYPE_CHECKING:
    from gids import cache as cache
    from gids import convert as convert
    from gids import cuda as cuda
    from gids import distributed as distributed
    from gids import heat as heat
    from gids import inference as inference
    from gids import io as io
    from gids import loader as loader
    from gids import sampler as sampler
    from gids import store as store
    from gids import write as write
    from gids.errors import (
        FormatError,
        MemoryBudgetError,
        MissingError,
        NoDeviceError,
        RankError,
        StorageError,
    )
    from gids.loader import EdgeLoader, FeatureLoader, NodeLoader, Source, Tuning
    from gids.loader.source import open as open
    from gids.store import FeatureStore

    __version__: str

__all__ = [
    "EdgeLoader",
    "FeatureLoader",
    "FeatureStore",
    "FormatError",
    "MemoryBudgetError",
    "MissingError",
    "NoDeviceError",
    "NodeLoader",
    "RankError",
    "Source",
    "StorageError",
    "Tuning",
]

_HOMES = {
    "EdgeLoader": "gids.loader",
    "FeatureLoader": "gids.loader",
    "FeatureStore": "gids.store",
    "FormatError": "gids.errors",
    "MemoryBudgetError": "gids.errors",
    "MissingError": "gids.errors",
    "NoDeviceError": "gids.errors",
    "NodeLoader": "gids.loader",
    "RankError": "gids.errors",
    "Source": "gids.loader",
    "StorageError": "gids.errors",
    "Tuning": "gids.loader",
    "open": "gids.loader.source",
}
_PARTS = (
    "cache",
    "convert",
    "cuda",
    "distributed",
    "heat",
    "inference",
    "io",
    "loader",
    "sampler",
    "store",
    "write",
)
"""Neither these nor open are in __all__: `from gids import *` must not replace the builtin."""


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    import importlib
    from importlib.metadata import version

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":
        return version("gids")
    if name in _PARTS:
        return importlib.import_module(f"gids.{name}")
    raise AttributeError(f"module 'gids' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS, "__version__", "open"])


dgl_finder.install()
