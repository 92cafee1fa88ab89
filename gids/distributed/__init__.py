"""Several processes: which of them holds which rows. See docs/internals/placement.md."""

from gids.distributed.place import Placement, place

__all__ = ["Placement", "place"]
