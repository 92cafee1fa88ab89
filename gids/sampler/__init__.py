"""Samplers: make minibatches from seeds, on the CPU or on a GPU. See docs/sampler.md."""

from gids.sampler.forest import TimedSeeds
from gids.sampler.labor import Labor
from gids.sampler.ladies import Ladies
from gids.sampler.locality import LocalityBias
from gids.sampler.minibatch import Block, Minibatch
from gids.sampler.neighbor import Neighbor
from gids.sampler.random_walk import RandomWalk
from gids.sampler.topology import Sampler, Topology, sort_by_time

__all__ = [
    "Block",
    "Labor",
    "Ladies",
    "LocalityBias",
    "Minibatch",
    "Neighbor",
    "RandomWalk",
    "Sampler",
    "TimedSeeds",
    "Topology",
    "sort_by_time",
]
