"""Several processes and machines: rows and edges are divided among ranks. See docs/distributed.md."""

from gids.distributed.group import Group
from gids.distributed.source import GroupSource, open

__all__ = ["Group", "GroupSource", "open"]
