"""Packs: features of many minibatches by one sequential pass over the tables, in place of random reads.

Called by the loader. See docs/internals/packs.md.
"""

from gids.packs.costs import DiskRates, measure_random, measure_rates
from gids.packs.cut import Layout, Resident, Work, sweep_seconds
from gids.packs.device_rows import DeviceRows, OnDevice
from gids.packs.memory import HostRows, PackBudget, PackPlan, RowMemory
from gids.packs.scratch import Scratch, ScratchFull, find_scratch
from gids.packs.spool import MOST_ROWS, WRITING, ByReference, NotSpoolable, Reads, Rows, Spool, rows_of
from gids.packs.superbatch import PackMachine, Superbatch

__all__ = [
    "MOST_ROWS",
    "WRITING",
    "ByReference",
    "DeviceRows",
    "DiskRates",
    "HostRows",
    "Layout",
    "NotSpoolable",
    "OnDevice",
    "PackBudget",
    "PackMachine",
    "PackPlan",
    "Reads",
    "Resident",
    "RowMemory",
    "Rows",
    "Scratch",
    "ScratchFull",
    "Spool",
    "Superbatch",
    "Work",
    "find_scratch",
    "measure_random",
    "measure_rates",
    "rows_of",
    "sweep_seconds",
]
