"""Reads other formats and converts them to datasets. See docs/sources.md."""

from gids.convert.run import Options, convert
from gids.convert.source import Source

__all__ = ["Options", "Source", "convert"]
