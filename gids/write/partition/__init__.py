"""Divide a dataset into parts, one per process or machine. Called by `gids partition`."""

from gids.write.partition.owners import METHODS
from gids.write.partition.run import PartFigures, Report, partition

__all__ = ["METHODS", "PartFigures", "Report", "partition"]
