"""Reads files past the page cache, with io_uring if the machine has it."""

from gids.io.engine import QUEUE_DEPTH, Engine, open_engine, probe
from gids.io.page_cache import drop_page_cache

__all__ = ["QUEUE_DEPTH", "Engine", "drop_page_cache", "open_engine", "probe"]
