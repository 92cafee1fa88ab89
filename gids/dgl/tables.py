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
from gids.loader.row_source import chosen_tables
from gids.loader.source import Source
from gids.store import Table

_DECLARED = {
    "node": ("prefetch_node_feats", "prefetch_ndata", "prefetch_labels"),
    "edge": ("prefetch_edge_feats", "prefetch_edata"),
}


class ServedTables:
    """The tables of a source that minibatches of ``graph`` may ask for.

    They are those in ``feats`` (names, or Tables of any store), and those that the sampler declares
    (``prefetch_node_feats`` and so on), of the first store that has one. A sampler that declares nothing may
    ask for any table.

    Raises KeyError for a column that neither a store nor the graph has, and ValueError for a table that does
    not fit the graph, or if the stores have no table of the graph's types.
    """

    def __init__(self, source: Source, graph: Any, sampler: Any, feats: Sequence[str | Table] = ()) -> None:
        self._graph = graph
        self._stored = [table for store in source.stores for table in store.tables.values()]
        #: Tables that each minibatch gets even if its sampler does not ask.
        self.always = list(chosen_tables(source, feats).values())
        declared = [self._find_stored(*column) for column in _declared_columns(sampler, graph)]
        tables = [*self.always, *filter(None, declared)]
        self._tables: dict[tuple[str, Any, str], Table] = {}
        for table in tables or [t for t in self._stored if t.type in _types(graph, t.kind)]:
            self._tables.setdefault((table.kind, table.type, table.key), source.match(table))
        if not self._tables:
            raise self.nothing_asked()
        for table in self.tables:
            _check_rows(table, graph)
        for table in {(table.kind, table.type): table for table in self.tables}.values():
            check_order(table, graph, source.stores)

    @property
    def tables(self) -> list[Table]:
        return list(self._tables.values())

    def nothing_asked(self) -> ValueError:
        return ValueError(
            "no column comes from the dataset: give the sampler prefetch_node_feats=[...] or "
            "prefetch_edge_feats=[...], or the loader gids_feats=[...]; the dataset has "
            f"{_listed(t.name for t in self._stored)}"
        )

    def find(self, kind: str, type_: Any, key: str) -> Table | None:
        """The table that holds a column, or None if the graph itself holds it.

        Raises KeyError if neither does, or if the table was not declared when the loader was made.
        """
        table = self._tables.get((kind, type_, key))
        if table is None and (undeclared := self._find_stored(kind, type_, key)) is not None:
            raise MissingError(
                f"a minibatch asks for {undeclared.name!r} of {undeclared.dataset}, which the sampler "
                f"did not declare: add gids_feats=[{undeclared.name!r}] to the loader"
            )
        return table

    def _find_stored(self, kind: str, type_: Any, key: str) -> Table | None:
        """The first store's table of a column; None if the graph has it. Raises KeyError if neither does."""
        for table in self._stored:
            if (table.kind, table.type, table.key) == (kind, type_, key):
                return table
        columns = list(getattr(self._graph, f"{kind}s")[type_].data.keys())
        if key not in columns:
            raise MissingError(
                f"{kind} feature {key!r} of type {type_!r} is neither in the dataset (has "
                f"{_listed(t.name for t in self._stored)}) nor in the graph (has {_listed(columns)})"
            )
        return None


def _check_rows(table: Table, graph: Any) -> None:
    if table.type not in (types := _types(graph, table.kind)):
        raise ValueError(
            f"table {table.name!r} of {table.dataset} is of {table.kind} type {table.type!r}, "
            f"which the graph does not have (has {_listed(types)})"
        )
    count = graph.num_nodes(table.type) if table.kind == "node" else graph.num_edges(table.type)
    if table.row_count != count:
        cure = ", or a subgraph made with relabel_nodes=False" if table.kind == "node" else ""
        raise ValueError(
            f"table {table.name!r} of {table.dataset} has {table.row_count} rows, but the graph has {count} "
            f"{table.kind}s of type {table.type!r}: give the graph of the dataset{cure}"
        )


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


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
