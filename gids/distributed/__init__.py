"""Several processes and machines: rows and edges are divided among ranks. See docs/distributed.md."""

from gids.distributed.cooperative import CooperativeMinibatch
from gids.distributed.place import Placement, place
from gids.distributed.source import GroupSource, open

__all__ = ["CooperativeMinibatch", "GroupSource", "Placement", "open", "place"]
