"""Reads files past the page cache, with io_uring if the machine has it."""

from gids.io.engine import Engine, drop_page_cache, open_engine, probe, queue_depth

__all__ = ["Engine", "drop_page_cache", "open_engine", "probe", "queue_depth"]
