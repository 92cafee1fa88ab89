"""Converters: what a source holds, whatever its format, and how it becomes a dataset. See docs/format.md."""

from gids.store.convert.run import Options, convert
from gids.store.convert.source import Source

__all__ = ["Options", "Source", "convert"]
