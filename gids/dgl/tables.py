"""The tables that a DGL loader reads, and the checks that they fit the graph. Called by the DataLoader.

DGL names a column by (kind, type, key): kind is "node" or "edge", type is a node type or a
(source, relation, destination) triple, key is the column's name.

dgl.reorder_graph and similar functions change ids but not the numbers of nodes and edges, so minibatches
would get the rows of other nodes. Two things show the order: the old ids, which DGL keeps in the graph, and
edges of the graph, which must be edges of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from dgl import EID, NID

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import FeatureStore, Graph, Table
from gids.store.names import Relation, describe_type

_DECLARED = {
    "node": ("prefetch_node_feats", "prefetch_ndata", "prefetch_labels"),
    "edge": ("prefetch_edge_feats", "prefetch_edata"),
}
_SAMPLES = 1000
_NEIGHBORS = 1 << 20
"""Most neighbors that are searched: about 30 MB."""
_OTHER_GRAPH = 0.05
"""A graph of another number of edges, of which a smaller share is in the dataset, has edges of its own."""
_CHUNK = 1 << 24


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


def check_order(table: Table, graph: Any, stores: Sequence[FeatureStore]) -> None:
    """Raise ValueError if the graph's nodes (edges) are in another order than the table's rows.

    stores: the stores whose topology is compared. In each relation of the nodes all sampled edges must be in
    the dataset; in that of the edges, with the same ids. Blocks for some thousand reads of the topology.
    """
    old_ids = _kept_ids(graph, table)
    if old_ids is not None and _is_identity(old_ids):
        return
    by_id, in_order = table.kind == "edge", False
    what, name = ("edges", "EID") if by_id else ("nodes", "NID")
    column = f"graph.{what}[{table.type!r}].data"
    for store, relation, stored in _shared_relations(graph, stores):
        types: list[Any] = [relation] if by_id else list(dict.fromkeys(relation[::2]))
        if table.type not in types:
            continue
        are_stored = _look_up(_sample(graph[relation]), stored, by_id=by_id)
        in_order = in_order or (len(are_stored) > 0 and bool(are_stored.all()))
        is_alike = graph.num_edges(relation) == stored.num_edges
        if not are_stored.all() and (is_alike or are_stored.mean() >= _OTHER_GRAPH):
            proof = (
                f"{are_stored.sum()} of {len(are_stored)} sampled edges of {describe_type(relation)} "
                f"({are_stored.mean():.1%}) are in {store.name}{' with the same ids' if by_id else ''}"
            )
            break
    else:
        if in_order or old_ids is None:
            return
        types, proof = [table.type], ""
    cure = (
        f"if the graph has edges of its own, and its {what} have the ids of {table.dataset}, say so: "
        f"{column}[dgl.{name}] = torch.arange({table.row_count})"
    )
    if old_ids is not None:
        proof = f"{column}['{NID}'] has their old ids"
        cure = f"if {table.dataset} was made from this graph, delete that column"
    types.sort(key=lambda type_: type_ != table.type)
    raise ValueError(
        f"the graph's {what} of type {' or '.join(map(repr, types))} are in another order than the rows of "
        f"{table.name!r}, as after dgl.reorder_graph ({proof}): give the loader the graph from before the "
        f"reordering; or, {cure}"
    )


def _kept_ids(graph: Any, table: Table) -> torch.Tensor | None:
    if table.kind == "node":
        ids = graph._node_frames[graph.get_ntype_id(table.type)].get(NID)
    else:
        ids = graph._edge_frames[graph.get_etype_id(table.type)].get(EID)
    return ids if isinstance(ids, torch.Tensor) and ids.dim() == 1 else None


def _is_identity(ids: torch.Tensor) -> bool:
    return all(
        torch.equal(
            on_host(ids[start : start + _CHUNK]).long(), torch.arange(start, min(start + _CHUNK, len(ids)))
        )
        for start in range(0, len(ids), _CHUNK)
    )


def _shared_relations(
    graph: Any, stores: Sequence[FeatureStore]
) -> Iterator[tuple[FeatureStore, Relation, Graph]]:
    """The common relations of graph and stores with equal numbers of nodes."""
    if graph.device.type != "cpu":
        return
    for store in stores:
        for relation in graph.canonical_etypes:
            if relation in store.relations and graph.num_edges(relation):
                try:
                    stored = store.graph(relation)
                except MissingError:  # a relation of edge features alone
                    continue
                counts = graph.num_nodes(relation[0]), graph.num_nodes(relation[2])
                if counts == (stored.num_src, stored.num_dst):
                    yield store, relation, stored


class _Edges(NamedTuple):
    """int64[n] each."""

    src: np.ndarray
    dst: np.ndarray
    ids: np.ndarray


def _sample(part: Any) -> _Edges:
    """Random edges of a graph of one relation, from a format that DGL has made; all of a small graph."""
    count = part.num_edges()
    drawn = np.random.default_rng(0).integers(0, count, _SAMPLES)
    positions = np.arange(count) if count <= _SAMPLES else np.sort(drawn)
    made = part.formats()["created"]
    if "coo" in made and "csc" not in made:
        src, dst = part.find_edges(torch.from_numpy(positions).to(part.idtype))
        return _Edges(src.long().numpy(), dst.long().numpy(), positions)
    by = "csc" if "csc" in made else "csr"
    indptr, neighbors, ids = (array.numpy() for array in part.adj_tensors(by))
    nodes = np.searchsorted(indptr, positions, side="right") - 1
    others = neighbors[positions].astype(np.int64)
    ids = ids[positions].astype(np.int64) if len(ids) else positions
    return _Edges(others, nodes, ids) if by == "csc" else _Edges(nodes, others, ids)


def _look_up(edges: _Edges, stored: Graph, *, by_id: bool) -> np.ndarray:
    """bool[m]: whether edges are in a dataset, as they are or reversed; m of them could be looked up."""
    ways = [edges]
    if stored.relation[0] == stored.relation[2]:
        if not by_id:  # a loop stays a loop in any order
            edges = _Edges(*(ends[edges.src != edges.dst] for ends in edges))
        ways = [edges, edges._replace(src=edges.dst, dst=edges.src)]
    hits, searched = zip(*(_search(way, stored, by_id) for way in ways), strict=True)
    hit = np.any(hits, 0)
    return np.compress(hit | np.all(searched, 0), hit)


def _search(edges: _Edges, stored: Graph, by_id: bool) -> tuple[np.ndarray, np.ndarray]:
    """bool[n] each: whether an edge is among those of its destination, and whether these were searched.

    Short lists of neighbors are searched first, up to _NEIGHBORS. Extents that cannot be right are left out,
    because a file may be damaged.
    """
    first, end = (stored.indptr[nodes].astype(np.int64) for nodes in (edges.dst, edges.dst + 1))
    sound = np.flatnonzero((first >= 0) & (end >= first) & (end <= stored.num_edges))
    sound = sound[np.argsort((end - first)[sound], kind="stable")]
    lists = sound[(end - first)[sound].cumsum() <= _NEIGHBORS]
    lengths = (end - first)[lists]
    owners = np.repeat(lists, lengths)
    positions = np.arange(len(owners)) + np.repeat(first[lists] - (lengths.cumsum() - lengths), lengths)
    hits = stored.indices[positions] == edges.src[owners]
    if by_id:
        hits &= (positions if stored.edge_ids is None else stored.edge_ids[positions]) == edges.ids[owners]
    hit, searched = np.zeros(len(edges.dst), bool), np.zeros(len(edges.dst), bool)
    hit[owners[hits]], searched[lists] = True, True
    return hit, searched
