"""Reads other formats and converts them to datasets. See docs/sources.md."""

from gids.convert.options import Options
from gids.convert.run import convert
from gids.convert.source import Source

__all__ = ["Options", "Source", "convert"]
