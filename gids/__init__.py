"""Out-of-core feature loading for graph neural networks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(f"gids needs Linux: it reads with direct I/O and io_uring (this is {sys.platform})")

if TYPE_CHECKING:
    from gids import distributed as distributed
    from gids import heat as heat
    from gids import inference as inference
    from gids import loader as loader
    from gids import sampler as sampler
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

__version__ = "0.4.0.dev0"
"""The version of the distribution, gids-loader: pyproject.toml takes it from here."""

_LOADERS = ("EdgeLoader", "FeatureLoader", "NodeLoader", "Source", "Tuning")
_PARTS = ("distributed", "heat", "inference", "loader", "sampler", "write")
"""Neither these nor open are in __all__: `from gids import *` must not replace the builtin."""


def __getattr__(name: str) -> Any:  # loads torch only when something that needs it is asked for
    import importlib

    if name in _PARTS:
        return importlib.import_module(f"gids.{name}")
    if name == "_core":  # asked for only where it cannot be imported
        try:
            return importlib.import_module("gids._core")
        except ModuleNotFoundError as error:
            if error.name != "gids._core":
                raise
            raise ImportError(
                f"{__file__} is the source of gids, without its native code, and hides the installed gids: "
                "start Python in another folder"
            ) from None
    if name == "open":
        home = "gids.loader.source"
    elif name == "FeatureStore":
        home = "gids.store"
    elif name in __all__:
        home = "gids.loader" if name in _LOADERS else "gids.errors"
    else:
        raise AttributeError(f"module 'gids' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS, "__version__", "open"])
