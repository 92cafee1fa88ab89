"""What a store's tables and types are called in PyG. Knows stores, and nothing of loading."""

from __future__ import annotations

from gids.store import FeatureStore, Table
from gids.store.names import Relation

LABEL = "y"
_USUAL = {"node": "x", "edge": "edge_attr"}
"""What PyG's models call the features of their input; `gids convert` calls them "feat"."""


def attribute_of(store: FeatureStore, table: Table) -> str:
    """The table's key; but "feat" is "x", or "edge_attr" of edges, unless its type has a table of that key
    as well.
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
    """One node type and one relation: PyG's Data. Else its HeteroData."""
    return len(store.node_types) == 1 and len(store.relations) == 1
