"""Chooses the tables that a loader reads, of one or several datasets. Called by the loaders; knows no ids.

Features have the name of their table. Tables of other datasets are given as `Table`s. If two tables have the
same name, the user gives a mapping from names to tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gids.sampler import Topology
from gids.store import FeatureStore, Table
from gids.store.names import describe_type

Tables = Sequence[str | Table] | Mapping[str, str | Table]
"""Names of tables of the loader's stores, or tables of any store; or a mapping from feature names to these.
"""


def chosen_tables(stores: FeatureStore | Sequence[FeatureStore], tables: Tables) -> dict[str, Table]:
    """The tables by the names of their features. A name, or a key, is looked up in one store after the other.

    Raises KeyError for a name that no store has, ValueError when two tables have one name.
    """
    if isinstance(stores, FeatureStore):
        stores = [stores]
    if isinstance(tables, str):
        raise TypeError(f"tables={tables!r}: give a list, [{tables!r}]")
    chosen: dict[str, Table] = {}
    if isinstance(tables, Mapping):
        for name, table_or_name in tables.items():
            chosen[name] = _table(stores, table_or_name).named(name)
        return chosen
    for table in (_table(stores, table_or_name) for table_or_name in tables):
        other = chosen.setdefault(table.name, table)
        if other.identity != table.identity:
            raise ValueError(f"two tables are called {table.name!r}: give names, tables={{'a': …, 'b': …}}")
    return chosen


def default_tables(stores: Iterable[FeatureStore], types: Collection[Any]) -> list[Table]:
    """Those that a loader takes without tables=: all of these types but the ones that were added later."""
    return [t for store in stores for t in store.tables.values() if t.type in types and not t.extra]


def check_table_fits(table: Table, topology: Topology, dataset: str) -> None:
    """Raise ValueError if a table does not fit the nodes and edges of this topology. dataset: its name."""
    if table.kind == "edge":
        if table.type not in topology.relations:
            raise ValueError(f"{table.name}: the dataset has no topology of this relation")
        count = topology.graphs[topology.relations.index(table.type)].num_edges
    else:
        if table.type not in topology.node_types:
            known = ", ".join(map(repr, topology.node_types))
            raise ValueError(
                f"{table.name}: no relation has nodes of type {table.type!r} (there are {known})"
            )
        count = topology.node_counts[topology.node_types.index(table.type)]
    if table.id_count != count:
        raise ValueError(
            f"{table.name} has {table.id_count} rows, and {dataset} has {count} {table.kind}s of type "
            f"{describe_type(table.type)}: tables of other datasets must be of the same {table.kind}s"
        )


def is_of_nodes(table: Table, store: FeatureStore) -> bool:
    """Whether the ids of a table, which may be in a part of a dataset, are those of a type of the store."""
    if not isinstance(table.type, str) or table.type not in store.node_types:
        return False
    return table.id_count == store.num_nodes(table.type)


def _table(stores: Sequence[FeatureStore], table: str | Table) -> Table:
    if isinstance(table, Table):
        return table
    if not isinstance(table, str):
        raise TypeError(f"tables has a {type(table).__name__}: give names of tables, or Tables of any store")
    named = [store for store in stores if table in store.tables]
    with_key = [store for store in stores if any(t.key == table for t in store.tables.values())]
    return (named or with_key or stores)[0].table(table)
