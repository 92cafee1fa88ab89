"""Which tables a loader reads, of one dataset or of several. Called by the loaders; knows no ids.

Features go by the name of their table. Tables of other datasets come as `Table`s, and where two go by one
name the user gives names: a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gids.sampler import Topology
from gids.store import FeatureStore, Table
from gids.store.names import describe_type

Tables = Sequence[str | Table] | Mapping[str, str | Table]
"""Names of tables of the loader's store, or tables of any store; in a mapping, by the names to go by."""


def chosen_tables(store: FeatureStore, tables: Tables) -> dict[str, Table]:
    """The tables by the names that their features go by.

    Raises KeyError for a name that the store does not have, ValueError when two tables go by one name.
    """
    if isinstance(tables, str):
        raise TypeError(f"tables={tables!r}; give a list, [{tables!r}]")
    found: dict[str, Table] = {}
    if isinstance(tables, Mapping):
        for name, given in tables.items():
            found[name] = _table(store, given).named(name)
        return found
    for table in (_table(store, given) for given in tables):
        other = found.setdefault(table.name, table)
        if other.shard_paths != table.shard_paths:
            raise ValueError(
                f"two tables are called {table.name!r}: name their features, tables={{'a': …, 'b': …}}"
            )
    return found


def check_table_fits(table: Table, topology: Topology, dataset: str) -> None:
    """Raise ValueError for a table that is not of nodes or edges of this topology, of the dataset's name."""
    if table.kind == "edge":
        if table.type not in topology.relations:
            raise ValueError(f"{table.name}: the dataset has no topology of that relation")
        count = topology.graphs[topology.relations.index(table.type)].num_edges
    else:
        if table.type not in topology.node_types:
            known = ", ".join(map(repr, topology.node_types))
            raise ValueError(f"{table.name}: no relation leads to or from {table.type!r} (there are {known})")
        count = topology.node_counts[topology.node_types.index(table.type)]
    if table.row_count != count:
        raise ValueError(
            f"{table.name} has {table.row_count} rows, and {dataset} has {count} {table.kind}s of type "
            f"{describe_type(table.type)}: tables of other datasets must be of the same {table.kind}s"
        )


def is_of_nodes(table: Table, store: FeatureStore) -> bool:
    """Whether a table has a row for each node of a type of the store."""
    if not isinstance(table.type, str) or table.type not in store.node_types:
        return False
    return table.row_count == store.num_nodes(table.type)


def _table(store: FeatureStore, given: str | Table) -> Table:
    if isinstance(given, Table):
        return given
    if not isinstance(given, str):
        raise TypeError(f"tables has a {type(given).__name__}; give names of tables, or Tables of any store")
    return store.table(given)
