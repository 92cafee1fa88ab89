"""PyG's names for a store's tables and types. Knows nothing of loading."""

from __future__ import annotations

from gids.store import FeatureStore, Table
from gids.store.names import Relation

LABEL = "y"
_USUAL = {"node": "x", "edge": "edge_attr"}
"""PyG's name for input features; `gids convert` calls them "feat"."""


def attribute_of(store: FeatureStore, table: Table) -> str:
    """The table's key, except that "feat" becomes "x" (of edges: "edge_attr"), unless its type also has a
    table with this key.
    """
    usual = _USUAL[table.kind]
    taken = store.find_table(table.kind, table.type, usual) is not None
    return usual if table.key == "feat" and not taken else table.key


def table_of(store: FeatureStore, type_: str | Relation, attribute: str) -> Table | None:
    """The table that has this name in PyG."""
    for table in store.tables.values():
        if table.type == type_ and attribute_of(store, table) == attribute:
            return table
    return None


def is_homogeneous(store: FeatureStore) -> bool:
    """Whether there is one node type and one relation at most: PyG's Data, else HeteroData."""
    return len(store.node_types) == 1 and len(store.relations) <= 1
