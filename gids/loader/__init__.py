"""The loader: composes sampling, cache and I/O into a stream of minibatches with features."""

from gids.loader.edge_loader import EdgeLoader, EdgeMinibatch
from gids.loader.epoch_loader import SampledEpoch
from gids.loader.feature_loader import FeatureLoader
from gids.loader.node_loader import NodeLoader
from gids.loader.options import Options, Tuning
from gids.loader.source import Source
from gids.loader.stats import epoch_figures
from gids.loader.stream import EpochStream

__all__ = [
    "EdgeLoader",
    "EdgeMinibatch",
    "EpochStream",
    "FeatureLoader",
    "NodeLoader",
    "Options",
    "SampledEpoch",
    "Source",
    "Tuning",
    "epoch_figures",
]
