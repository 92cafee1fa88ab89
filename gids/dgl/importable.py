"""Make DGL importable beside a current torch. Called once, when ``gids.dgl`` is imported.

PyPI's DGL 2.1.0 imports its GraphBolt part with everything else, and GraphBolt's compiled library
exists for torch 2.0.0 to 2.2.1 only. Where it cannot load, ``dgl.graphbolt`` becomes a stand-in whose
names raise ImportError when used; the rest of DGL does not need it. DGL 1.1.3 has no GraphBolt.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_INSTALL = "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas"  # DGL does not declare these two
_GRAPHBOLT = "dgl.graphbolt"
_GRAPHBOLT_IMPORTS = ("pandas", "pydantic", "torchdata.datapipes", "torchdata.dataloader2", "yaml")


def import_dgl() -> ModuleType:
    """Import DGL and return it. A DGL that is imported already is left as it is.

    Raises ImportError if DGL, or something that it needs, is not installed.
    """
    if sys.modules.get("dgl") is None:
        package = _package_dir()
        if (package / "graphbolt").is_dir() and not _graphbolt_loads(package):
            sys.meta_path.insert(0, _StandInFinder())
        if not _backend_is_chosen():
            os.environ["DGLBACKEND"] = "pytorch"  # else DGL prints advice and writes ~/.dgl/config.json
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning):  # of DGL's own source, met when it compiles
            warnings.simplefilter("ignore", category)
        try:
            import dgl
        except ModuleNotFoundError as error:
            raise ImportError(f"DGL needs {error.name!r}: {_INSTALL}", name=error.name) from error
    return dgl  # type: ignore[no-any-return]


def _package_dir() -> Path:
    spec = importlib.util.find_spec("dgl")
    if spec is None or spec.origin is None:  # None: a folder that happens to be called dgl
        raise ImportError(f"gids.dgl needs DGL: {_INSTALL}", name="dgl")
    return Path(spec.origin).parent


def _graphbolt_loads(package: Path) -> bool:
    version = torch.__version__.split("+", maxsplit=1)[0]
    if not (package / "graphbolt" / f"libgraphbolt_pytorch_{version}.so").exists():
        return False
    try:
        return all(importlib.util.find_spec(name) is not None for name in _GRAPHBOLT_IMPORTS)
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def _backend_is_chosen() -> bool:
    if "DGLBACKEND" in os.environ:
        return True
    config = Path(os.environ.get("DGLDEFAULTDIR", Path.home() / ".dgl"), "config.json")
    try:
        backend = json.loads(config.read_text()).get("backend", "")
    except (OSError, ValueError, AttributeError):
        return False
    return str(backend).lower() in ("mxnet", "pytorch", "tensorflow")


class _StandIn(ModuleType):
    """A module that imports and has nothing in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system, inspect, pickle
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name}: dgl.graphbolt needs torch <= 2.2.1 (and torchdata < 0.8); "
            f"this is torch {torch.__version__}. The rest of DGL works."
        )


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for ``dgl.graphbolt`` and everything below it, and for nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _GRAPHBOLT and not fullname.startswith(_GRAPHBOLT + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, "Stands in for DGL's GraphBolt, which cannot load beside this torch.")

    def exec_module(self, module: ModuleType) -> None:
        pass
