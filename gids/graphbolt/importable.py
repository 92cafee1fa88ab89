"""Imports DGL's GraphBolt, or says what to install. Called by the package."""

from __future__ import annotations

from types import ModuleType

import torch


def import_graphbolt() -> ModuleType:
    """Import the real ``dgl.graphbolt``, not the stand-in that gids makes beside a newer torch.

    Raises ImportError.
    """
    found = "no DGL that can be imported"
    try:
        from gids.dgl_finder import import_dgl

        found = f"dgl {import_dgl().__version__}"
        from dgl import graphbolt

        graphbolt.Feature  # noqa: B018  (ImportError where the module only stands in)
    except ImportError as error:
        raise ImportError(
            "gids.graphbolt needs DGL's GraphBolt: dgl 2.1.0, torch 2.2.0 or 2.2.1, torchdata<0.8, numpy<2, "
            "pandas, pydantic and pyyaml, on Python 3.11; here are "
            f"torch {torch.__version__} and {found} ({error}). In a clone of gids, "
            "`tools/graphbolt_env.sh DIRECTORY` makes such an environment; gids.dgl works without it",
            name="dgl.graphbolt",
        ) from error
    return graphbolt  # type: ignore[no-any-return]
