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
_RUNS, _RUN_NODES = 256, 16
"""Runs of successive nodes, of which one edge each may be sampled: few pages of a mapped graph."""
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
    kept = _kept_ids(graph, table)
    if kept is not None and _is_identity(kept):
        return
    by_id, in_order, proof, types = table.kind == "edge", False, None, [table.type]
    for store, relation, stored in _shared_relations(graph, stores):
        if table.type == relation if by_id else table.type in (relation[0], relation[2]):
            found = _look_up(_sample(graph[relation]), stored, by_id=by_id)
            in_order = in_order or (len(found) > 0 and bool(found.all()))
            alike = graph.num_edges(relation) == stored.num_edges
            if not found.all() and (alike or found.mean() >= _OTHER_GRAPH):
                same = " with the same ids" if by_id else ""
                proof = (
                    f"{found.sum()} of {len(found)} sampled edges of {describe_type(relation)} "
                    f"({found.mean():.1%}) are in {store.name}{same}"
                )
                types += [] if by_id else [t for t in relation[::2] if t != table.type]
                break
    if proof is None and (in_order or kept is None):
        return
    what, name = ("edges", "EID") if by_id else ("nodes", "NID")
    column = f"graph.{what}[{table.type!r}].data"
    cure = (
        f"if the graph has edges of its own, and its {what} have the ids of {table.dataset}, say so: "
        f"{column}[dgl.{name}] = torch.arange({table.row_count})"
    )
    if kept is not None:
        proof = f"{column}['{NID}'] has their old ids"
        cure = f"if {table.dataset} was made from this graph, delete that column"
    named = " or ".join(map(repr, types))
    raise ValueError(
        f"the graph's {what} of type {named} are in another order than the rows of {table.name!r}, as after "
        f"dgl.reorder_graph ({proof}): give the loader the graph from before the reordering; or, {cure}"
    )


def _kept_ids(graph: Any, table: Table) -> torch.Tensor | None:
    if table.kind == "node":
        found = graph._node_frames[graph.get_ntype_id(table.type)].get(NID)
    else:
        found = graph._edge_frames[graph.get_etype_id(table.type)].get(EID)
    return found if isinstance(found, torch.Tensor) and found.dim() == 1 else None


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

    def only(self, chosen: np.ndarray) -> _Edges:
        return _Edges(*(part[chosen] for part in self))


def _sample(part: Any) -> _Edges:
    """Edges of a graph of one relation, from a format that DGL has already made; all of a small graph."""
    count, rng = part.num_edges(), np.random.default_rng(0)
    positions = np.arange(count) if count <= _SAMPLES else rng.integers(0, count, _SAMPLES)
    made = part.formats()["created"]
    if "coo" in made and "csc" not in made:
        src, dst = part.find_edges(torch.from_numpy(positions).to(part.idtype))
        return _Edges(src.long().numpy(), dst.long().numpy(), positions)
    by = "csc" if "csc" in made else "csr"
    indptr, neighbors, ids = (t.numpy() for t in part.adj_tensors(by))
    last = len(indptr) - 2
    starts = rng.integers(0, max(1, last + 1 - _RUN_NODES), _RUNS)
    nodes = np.unique(np.minimum(starts[:, None] + np.arange(_RUN_NODES), last))
    first, degrees, _ = _extents(indptr, nodes, count)
    chosen = rng.permutation(np.flatnonzero(degrees))[:_SAMPLES]
    if len(chosen) == _SAMPLES < count:
        nodes, positions = nodes[chosen], first[chosen] + rng.integers(0, degrees[chosen])
    else:  # the graph is small, or few nodes have edges
        nodes = np.searchsorted(indptr, positions, side="right") - 1
    others = neighbors[positions].astype(np.int64)
    ids = ids[positions].astype(np.int64) if len(ids) else positions
    return _Edges(others, nodes, ids) if by == "csc" else _Edges(nodes, others, ids)


def _look_up(edges: _Edges, stored: Graph, *, by_id: bool) -> np.ndarray:
    """bool[m]: whether edges are in a dataset, as they are or reversed; m of them could be looked up."""
    ways, same_type = [edges], stored.relation[0] == stored.relation[2]
    if same_type and not by_id:  # a loop stays a loop in any order
        ways = [edges := edges.only(edges.src != edges.dst)]
    if same_type:
        ways.append(edges._replace(src=edges.dst, dst=edges.src))
    found, known = (
        np.stack(of_ways) for of_ways in zip(*(_search(w, stored, by_id) for w in ways), strict=True)
    )
    either = np.logical_or.reduce(found)
    return np.asarray(either[either | known.all(0)])


def _search(edges: _Edges, stored: Graph, by_id: bool) -> tuple[np.ndarray, np.ndarray]:
    """bool[n] each: whether an edge is among those of its destination, and whether these were searched.

    Short lists of neighbors are searched first, up to _NEIGHBORS.
    """
    first, degrees, known = _extents(stored.indptr, edges.dst, stored.num_edges)
    order = np.argsort(degrees, kind="stable")
    searched = order[degrees[order].cumsum() <= _NEIGHBORS]
    lengths = degrees[searched]
    owners = np.repeat(searched, lengths)
    positions = np.arange(len(owners)) + np.repeat(first[searched] - (lengths.cumsum() - lengths), lengths)
    hits = stored.indices[positions] == edges.src[owners]
    if by_id:
        hits &= (positions if stored.edge_ids is None else stored.edge_ids[positions]) == edges.ids[owners]
    of_searched = np.isin(np.arange(len(edges.dst)), searched)
    return np.bincount(owners[hits], minlength=len(edges.dst)) > 0, known & of_searched


def _extents(indptr: np.ndarray, nodes: np.ndarray, edges: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First position and number of the neighbors of nodes, and whether they can be right: a file may be
    damaged."""
    first, end = indptr[nodes].astype(np.int64), indptr[nodes + 1].astype(np.int64)
    sound = (first >= 0) & (end >= first) & (end <= edges)
    return np.where(sound, first, 0), np.where(sound, end - first, 0), sound
