"""Datasets on disk: the layout, opening, writing, verifying. See docs/format.md."""

from gids.store.feature_store import FeatureStore, open_store
from gids.store.graph import Graph
from gids.store.pinned_graph import PinnedGraph
from gids.store.restripe import restripe
from gids.store.rows import GeneratedRows, Rows
from gids.store.table import Table
from gids.store.topology import edge_list
from gids.store.verify import verify
from gids.store.writer import DatasetWriter

__all__ = [
    "DatasetWriter",
    "FeatureStore",
    "GeneratedRows",
    "Graph",
    "PinnedGraph",
    "Rows",
    "Table",
    "edge_list",
    "open_store",
    "restripe",
    "verify",
]
