"""Open, read and check datasets on disk. See docs/internals/format.md. `gids.write` makes them."""

from gids.store.feature_store import FeatureStore, Graph, graphs_of, open_store
from gids.store.manifest import Part
from gids.store.part import Held, NotHeldError
from gids.store.rows import GeneratedRows, Rows
from gids.store.table import Table
from gids.store.verification import verify

__all__ = [
    "FeatureStore",
    "GeneratedRows",
    "Graph",
    "Held",
    "NotHeldError",
    "Part",
    "Rows",
    "Table",
    "graphs_of",
    "open_store",
    "verify",
]
