"""The names under which gids.bench imports gids.sizes."""

from gids.sizes import format_bytes, parse_bytes

__all__ = ["format_bytes", "parse_bytes"]
