"""Imports DGL, with errors that say what to install. Called once, when ``gids.dgl`` is imported."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from types import ModuleType

from gids import dgl_finder

_INSTALL = "pip install 'dgl>=1.1.3,<=2.1.0' packaging pandas"  # DGL does not declare these two


def import_dgl() -> ModuleType:
    """Import DGL and return it. A DGL that is imported already is left as it is.

    Raises ImportError if DGL, or something that it needs, is not installed.
    """
    if sys.modules.get("dgl") is None:
        spec = importlib.util.find_spec("dgl")
        if spec is None or spec.origin is None:  # None: a folder that happens to be called dgl
            raise ImportError(f"gids.dgl needs DGL: {_INSTALL}", name="dgl")
        dgl_finder.install()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning):  # of DGL's own source, met when it compiles
            warnings.simplefilter("ignore", category)
        try:
            import dgl
        except ModuleNotFoundError as error:
            raise ImportError(f"DGL needs {error.name!r}: {_INSTALL}", name=error.name) from error
    return dgl  # type: ignore[no-any-return]
