"""Converters: what a source holds, whatever its format, and how it becomes a dataset. See docs/format.md."""

from gids.convert.run import Options, convert
from gids.convert.source import Source

__all__ = ["Options", "Source", "convert"]
