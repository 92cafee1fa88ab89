"""Makes DGL importable beside a current torch. Installed by ``import gids.dgl``; acts when DGL is imported.

PyPI's DGL 2.1.0 imports its GraphBolt part with everything else, and GraphBolt's compiled library exists for
torch 2.0.0 to 2.2.1 only. If it cannot load, ``dgl.graphbolt`` becomes a stand-in whose names raise
ImportError when used. The rest of DGL does not need it. DGL 1.1.3 has no GraphBolt.

``import gids`` alone installs nothing.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

_INSTALL = "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas"  # DGL does not declare these two
_GRAPHBOLT = "dgl.graphbolt"
_GRAPHBOLT_IMPORTS = ("pandas", "pydantic", "torchdata.datapipes", "torchdata.dataloader2", "yaml")


def install() -> None:
    """Put the finder before all others. May be called again."""
    if not any(isinstance(finder, DGLFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DGLFinder())


def import_dgl() -> ModuleType:
    """Import DGL and return it. A DGL that is imported already is left as it is.

    Raises ImportError if DGL, or something that it needs, is not installed.
    """
    import importlib.util
    import warnings

    if sys.modules.get("dgl") is None:
        spec = importlib.util.find_spec("dgl")
        if spec is None or spec.origin is None:  # None: a folder that happens to be called dgl
            raise ImportError(f"gids.dgl needs DGL, of Python 3.11 or 3.12: {_INSTALL}", name="dgl")
        install()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning):  # of DGL's own source, met when it compiles
            warnings.simplefilter("ignore", category)
        try:
            import dgl
        except ModuleNotFoundError as error:
            raise ImportError(f"DGL needs {error.name!r}: {_INSTALL}", name=error.name) from error
    return dgl  # type: ignore[no-any-return]


class DGLFinder:
    """Finds the stand-in for ``dgl.graphbolt``, if that cannot load, and for every module below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "dgl.backend":
            # Without a choice DGL would print advice and write ~/.dgl/config.json.
            os.environ.setdefault("DGLBACKEND", "pytorch")
        elif fullname == _GRAPHBOLT:
            if path is not None and _lies_there_and_cannot_load(path):
                return self._spec(fullname)
        elif fullname.startswith(_GRAPHBOLT + ".") and isinstance(sys.modules.get(_GRAPHBOLT), _StandIn):
            return self._spec(fullname)
        return None

    def _spec(self, fullname: str) -> ModuleSpec:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]  # has what loaders need

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, "Stands in for DGL's GraphBolt, which cannot load beside this torch.")

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module that can be imported and is empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system, inspect, pickle
            raise AttributeError(name)
        import torch

        raise ImportError(
            f"{self.__name__}.{name}: dgl.graphbolt needs torch <= 2.2.1 (and torchdata < 0.8); "
            f"this is torch {torch.__version__}. The rest of DGL works."
        )


def _lies_there_and_cannot_load(path: Sequence[str]) -> bool:
    """path: DGL's."""
    from importlib.util import find_spec
    from pathlib import Path

    import torch

    folder = next((f for f in (Path(entry, "graphbolt") for entry in path) if f.is_dir()), None)
    if folder is None:
        return False
    version = torch.__version__.split("+", maxsplit=1)[0]
    if not (folder / f"libgraphbolt_pytorch_{version}.so").exists():
        return True
    try:
        return any(find_spec(name) is None for name in _GRAPHBOLT_IMPORTS)
    except ModuleNotFoundError:  # the parent of a dotted name
        return True
