"""Checks that a graph's nodes and edges are in the order of a dataset's rows. Called by ServedTables.

dgl.reorder_graph and similar functions change ids but not the numbers of nodes and edges, so minibatches
would get the rows of other nodes. Two things show the order: the old ids, which DGL keeps in the graph, and
edges of the graph, which must be edges of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from dgl import EID, NID

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import FeatureStore, Graph, Table
from gids.store.names import Relation, describe_type

_SAMPLES = 1000
_NEIGHBORS = 1 << 20
"""Most neighbors that are searched: about 30 MB."""
_OTHER_GRAPH = 0.05
"""A graph of another number of edges, of which a smaller share is in the dataset, has edges of its own."""
_CHUNK = 1 << 24


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
