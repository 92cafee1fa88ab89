"""GraphBolt with features on disk: a Feature, a FeatureStore, and lookahead as a stage of its data pipe.

Importing this needs DGL's GraphBolt, which no current torch can load; the ImportError says what to install.
It composes gids.store and gids.loader, and decides nothing about caching.
"""

import torch

from gids.dgl_finder import import_dgl

_dgl = "no DGL that can be imported"
try:
    _dgl = f"dgl {import_dgl().__version__}"
    from dgl import graphbolt

    graphbolt.Feature  # noqa: B018  (ImportError where the module only stands in)
except ImportError as error:
    raise ImportError(
        "gids.graphbolt needs DGL's GraphBolt: dgl 2.1.0, torch 2.2.0 or 2.2.1, torchdata<0.8, numpy<2, "
        f"pandas, pydantic and pyyaml, on Python 3.11; here are torch {torch.__version__} and {_dgl} "
        f"({error}). In a clone of gids, `tools/graphbolt_env.sh DIRECTORY` makes such an environment; "
        "gids.dgl works without it",
        name="dgl.graphbolt",
    ) from error

from gids.graphbolt.feature import Feature, FeatureStore  # noqa: E402  (need GraphBolt)
from gids.graphbolt.fetcher import LookaheadFetcher  # noqa: E402

__all__ = ["Feature", "FeatureStore", "LookaheadFetcher"]
