"""The loader: composes sampling, cache and I/O into a stream of minibatches with features."""

from gids.loader.edge_loader import EdgeLoader, EdgeMinibatch
from gids.loader.feature_loader import FeatureLoader
from gids.loader.node_loader import NodeLoader
from gids.loader.options import Tuning
from gids.loader.source import Source
from gids.loader.stats import epoch_figures

__all__ = [
    "EdgeLoader",
    "EdgeMinibatch",
    "FeatureLoader",
    "NodeLoader",
    "Source",
    "Tuning",
    "epoch_figures",
]
