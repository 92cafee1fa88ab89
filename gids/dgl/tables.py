"""The tables that a DGL loader reads, and the checks that they fit the graph. Called by the DataLoader.

DGL names a column by (kind, type, key): kind is "node" or "edge", type is a node type or a
(source, relation, destination) triple, key is the column's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dgl

from gids.dgl.order import check_order
from gids.errors import MissingError
from gids.store import FeatureStore, Table

_DECLARED = {
    "node": ("prefetch_node_feats", "prefetch_ndata", "prefetch_labels"),
    "edge": ("prefetch_edge_feats", "prefetch_edata"),
}


class ServedTables:
    """The tables of ``stores`` that minibatches of ``graph`` may ask for.

    They are the tables in ``feats`` (names, or Tables of any store), and the stored tables that the sampler
    declares (``prefetch_node_feats`` and so on). A sampler that declares nothing and is not DGL's own may ask
    for any table. If a column is in several stores, ``feats`` chooses one.

    Raises KeyError for a column that neither a store nor the graph has, and ValueError for a table that does
    not fit the graph, for a graph whose nodes or edges are in another order than a table's rows, for a column
    that is in two stores, or if nothing is asked for.
    """

    def __init__(
        self, stores: Sequence[FeatureStore], graph: Any, sampler: Any, feats: Sequence[str | Table] = ()
    ) -> None:
        self._stores = stores
        self._names = " and ".join(store.name for store in stores)
        self._all_stored = [table for store in stores for table in store.tables.values()]
        self._listed_tables = _listed(table.name for table in self._all_stored)
        self._graph = graph
        self._tables: dict[tuple[str, Any, str], Table] = {}
        self._in_order: set[tuple[str, Any]] = set()
        #: Tables that each minibatch gets even if its sampler does not ask.
        self.always = [self._add(self._named(feat)) for feat in feats]
        for kind, type_, key in _declared_columns(sampler, graph):
            table = self._tables.get((kind, type_, key)) or self._stored(kind, type_, key)
            if table is not None:
                self._add(table)
        if not self._tables and not type(sampler).__module__.startswith("dgl."):
            for table in self._all_stored:
                if table.type in _types(graph, table.kind):
                    self._add(table)
        if not self._tables:
            raise ValueError(
                f"nothing asks for a table of {self._names}: give the sampler prefetch_node_feats=[...] or "
                f"prefetch_edge_feats=[...], or the loader gids_feats=[...]; it has {self._listed_tables}"
            )

    @property
    def tables(self) -> list[Table]:
        return list(self._tables.values())

    def find(self, kind: str, type_: Any, key: str) -> Table | None:
        """The table that holds a column, or None if the graph itself holds it.

        Raises KeyError if neither does, or if the table was not declared when the loader was made.
        """
        table = self._tables.get((kind, type_, key))
        if table is None and (undeclared := self._stored(kind, type_, key)) is not None:
            raise MissingError(
                f"a minibatch asks for {undeclared.name!r} of {undeclared.dataset}, which the sampler "
                f"did not declare: add gids_feats=[{undeclared.name!r}] to the loader"
            )
        return table

    def _add(self, table: Table) -> Table:
        types = _types(self._graph, table.kind)
        if table.type not in types:
            raise ValueError(
                f"table {table.name!r} of {table.dataset} is of {table.kind} type {table.type!r}, "
                f"which the graph does not have (has {_listed(types)})"
            )
        count = self._graph.num_nodes if table.kind == "node" else self._graph.num_edges
        if table.row_count != count(table.type):
            cure = "give the graph of the dataset"
            if table.kind == "node":
                cure += ", or a subgraph made with relabel_nodes=False"
            raise ValueError(
                f"table {table.name!r} of {table.dataset} has {table.row_count} rows, but the graph has "
                f"{count(table.type)} {table.kind}s of type {table.type!r}: {cure}"
            )
        if (table.kind, table.type) not in self._in_order:
            check_order(table, self._graph, self._stores)
            self._in_order.add((table.kind, table.type))
        return _only([self._tables.setdefault((table.kind, table.type, table.key), table), table])

    def _named(self, feat: str | Table) -> Table:
        """A table of gids_feats, which is given itself, by its name or by its key."""
        if isinstance(feat, Table):
            return feat
        stored = self._all_stored
        named = [t for t in stored if t.name == feat] or [t for t in stored if t.key == feat]
        if not named:
            raise MissingError(f"no table {feat!r} in {self._names} (has {self._listed_tables})")
        return _only(named)

    def _stored(self, kind: str, type_: Any, key: str) -> Table | None:
        """The table of a column, or None if the graph has it. Raises KeyError if neither does."""
        tables = [table for store in self._stores if (table := store.find_table(kind, type_, key))]
        if tables:
            return _only(tables)
        if key not in (frame := _frame(self._graph, kind, type_)):
            raise MissingError(
                f"{kind} feature {key!r} of type {type_!r} is neither in {self._names} "
                f"(has {self._listed_tables}) nor in the graph (has {_listed(frame)})"
            )
        return None


def _only(tables: Sequence[Table]) -> Table:
    """The first table. Raises ValueError unless all are the same table."""
    different = {table.identity: table for table in tables}
    if len(different) > 1:
        listed = " or ".join(f"{table.name!r} of {table.dataset}" for table in different.values())
        raise ValueError(
            f"{tables[0].key!r} may be {listed}: give the loader the right table, "
            f"gids_feats=[store.table({tables[0].name!r})]"
        )
    return tables[0]


def _declared_columns(sampler: Any, graph: Any) -> Iterator[tuple[str, Any, str]]:
    """The columns in a sampler's ``prefetch_*`` attributes."""
    declared = _DECLARED
    if isinstance(sampler, dgl.dataloading.EdgePredictionSampler):
        yield from _declared_columns(sampler.sampler, graph)
        declared = {"edge": ("prefetch_labels",)}
    for kind, attributes in declared.items():
        for attribute in attributes:
            keys = getattr(sampler, attribute, None) or []
            # A list is for the only type; with several types DGL refuses it.
            if not isinstance(keys, Mapping):
                keys = dict.fromkeys(_types(graph, kind)[:1], keys)
            for type_, names in keys.items():
                canonical = type_ if kind == "node" else graph.to_canonical_etype(type_)
                for name in names:
                    yield kind, canonical, name


def _types(graph: Any, kind: str) -> list[Any]:
    return list(graph.ntypes if kind == "node" else graph.canonical_etypes)


def _frame(graph: Any, kind: str, type_: Any) -> Any:
    if kind == "node":
        return graph._node_frames[graph.get_ntype_id(type_)]
    return graph._edge_frames[graph.get_etype_id(type_)]


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
