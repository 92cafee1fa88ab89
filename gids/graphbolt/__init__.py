"""GraphBolt with features on disk: a Feature, a FeatureStore, and lookahead as a stage of its data pipe.

Importing this needs DGL's GraphBolt, which no current torch can load; the ImportError says what to install.
It composes gids.store and gids.loader, and decides nothing about caching.
"""

from gids.graphbolt.importable import import_graphbolt

import_graphbolt()

from gids.graphbolt.feature import Feature, FeatureStore  # noqa: E402  (need GraphBolt)
from gids.graphbolt.fetcher import LookaheadFetcher  # noqa: E402

__all__ = ["Feature", "FeatureStore", "LookaheadFetcher"]
