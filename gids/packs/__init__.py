"""Packs: features of many minibatches by one sequential pass over the tables, in place of random reads.

Called by the loader. See docs/internals/packs.md.
"""

from gids.packs.costs import DiskRates, measure_random, measure_rates
from gids.packs.scratch import Scratch, ScratchFull, find_scratch

__all__ = [
    "DiskRates",
    "Scratch",
    "ScratchFull",
    "find_scratch",
    "measure_random",
    "measure_rates",
]
