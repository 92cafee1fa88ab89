"""Packs: rows of many minibatches by one sequential pass over the tables, in place of random reads.

Called by the loader. See docs/internals/packs.md.
"""

from gids.packs.annex import Annex, RowUses, Superbatch
from gids.packs.predict import DiskRates, measure_rates, predict
from gids.packs.scratch import Scratch, ScratchFull, find_scratch
from gids.packs.spool import MOST_ROWS, NotSpoolable, Spool, rows_of

__all__ = [
    "MOST_ROWS",
    "Annex",
    "DiskRates",
    "NotSpoolable",
    "RowUses",
    "Scratch",
    "ScratchFull",
    "Spool",
    "Superbatch",
    "find_scratch",
    "measure_rates",
    "predict",
    "rows_of",
]
