"""Packs: features of many minibatches by one sequential pass over the tables, in place of random reads.

Called by the loader. See docs/internals/packs.md.
"""

from gids.packs.costs import DiskRates, measure_rates
from gids.packs.cut import Candidate, Layout, choose_layout
from gids.packs.memory import PackBudget, PackPlan
from gids.packs.row_reader import RowReader
from gids.packs.scratch import Scratch, ScratchFull, find_scratch
from gids.packs.spaces import MOST_ROWS, OtherIdsError, Rows, Space, rows_of, spaces_of
from gids.packs.spool import NotSpoolable, Spool
from gids.packs.superbatch import PackMachine, Superbatch

__all__ = [
    "MOST_ROWS",
    "Candidate",
    "DiskRates",
    "Layout",
    "NotSpoolable",
    "OtherIdsError",
    "PackBudget",
    "PackMachine",
    "PackPlan",
    "RowReader",
    "Rows",
    "Scratch",
    "ScratchFull",
    "Space",
    "Spool",
    "Superbatch",
    "choose_layout",
    "find_scratch",
    "measure_rates",
    "rows_of",
    "spaces_of",
]
