"""Converters: what a source holds, whatever its format, and how it becomes a dataset. See docs/sources.md."""

from gids.convert.run import Options, convert
from gids.convert.source import Source

__all__ = ["Options", "Source", "convert"]
