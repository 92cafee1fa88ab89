"""Divide a dataset into parts, one per process or machine. Called by `gids partition`."""

from gids.write.partition.owners import METHODS
from gids.write.partition.report import PartFigures, Report
from gids.write.partition.run import partition

__all__ = ["METHODS", "PartFigures", "Report", "partition"]
