"""Checks that a graph's nodes and edges are in the order of a dataset's rows. Called by ServedTables.

dgl.reorder_graph and similar functions change ids but not the numbers of nodes and edges, so minibatches
would get the rows of other nodes. Two things show that: the old ids, which DGL keeps in the graph, and
samples of the dataset's topology. If most sampled edges are not in the dataset, the graph has other edges,
and its nodes are assumed to be in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from dgl import EID, NID

from gids.errors import MissingError
from gids.store import FeatureStore, Graph, Table
from gids.store.names import Relation

_WINDOWS = 64  # runs of successive nodes whose edges are sampled: few pages of a mapped graph
_WINDOW_NODES = 64
_SAMPLES = 512
_FEWEST = 16  # fewest samples for a decision
_LONGEST = 4096  # most neighbors of a node that are searched
_CHUNK = 1 << 24
_DEGREES = 1 << 20  # most values that are distinguished


def check_order(table: Table, graph: Any, stores: Sequence[FeatureStore]) -> None:
    """Raise ValueError if the graph's nodes (edges) are in another order than the table's rows.

    stores: the stores whose topology is compared. Cost: some thousand reads of the topology. If most sampled
    edges are not in the dataset, but it has the same number of edges: one pass over all degrees.
    """
    kept = _kept_ids(graph, table)
    if kept is not None and _is_identity(kept):
        return
    pairs = _shared_relations(graph, stores)
    if isinstance(table.type, str):
        differ = _nodes_differ(table.type, pairs, look_at_degrees=kept is None)
        what, same = "nodes", "has the same degrees at other nodes"
    else:
        differ = _edges_differ(table.type, pairs)
        what, same = "edges", "has the same edges with other ids"
    if differ or (differ is None and kept is not None):
        column = f"graph.{what}[{table.type!r}].data['{NID}']"
        proof = f"{table.dataset} {same}" if kept is None else f"{column} has their old ids"
        cure = (
            "" if kept is None else f"; or, if {table.dataset} was made from this graph, delete that column"
        )
        raise ValueError(
            f"the graph's {what} of type {table.type!r} are in another order than the rows of "
            f"{table.name!r}, as after dgl.reorder_graph ({proof}): give the loader the graph from before "
            f"the reordering{cure}"
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
            ids[start : start + _CHUNK].cpu().long(), torch.arange(start, min(start + _CHUNK, len(ids)))
        )
        for start in range(0, len(ids), _CHUNK)
    )


def _nodes_differ(ntype: str, pairs: Pairs, *, look_at_degrees: bool) -> bool | None:
    """None: unknown."""
    for relation, mine, stored in pairs:
        if ntype in (relation[0], relation[2]):
            alike = _are_alike(relation, mine, stored, by_id=False)
            if alike:
                return False
            if look_at_degrees and alike is False and _reordered_type(relation, mine, stored) == ntype:
                return True
    return None


def _edges_differ(relation: Relation, pairs: Pairs) -> bool | None:
    """None: unknown, for example because the nodes are in another order, too."""
    for shared, mine, stored in pairs:
        if shared == relation and mine.num_edges == stored.num_edges:
            if _are_alike(relation, stored, mine, by_id=True):
                return False
            if _are_alike(relation, mine, stored, by_id=False):
                return True
    return None


def _are_alike(relation: Relation, one: _Topology, other: _Topology, *, by_id: bool) -> bool | None:
    """Whether most edges of one graph are in the other, as they are or reversed. by_id: with the same ids.

    None: too few edges can be looked up.
    """
    edges = one.sample()
    same_type = relation[0] == relation[2]
    if same_type:  # a loop stays a loop in any order
        edges = edges.only(edges.src != edges.dst)
    ways = [edges, _Edges(edges.dst, edges.src, edges.ids)] if same_type else [edges]
    found = [other.has(way, by_id=by_id) for way in ways]
    shares = [float(way.mean()) for way in found if len(way) >= _FEWEST]
    return max(shares) > 0.5 if shares else None


def _reordered_type(relation: Relation, mine: _Topology, stored: _Compressed) -> str | None:
    """The node type with the same degrees at other nodes: its nodes are in another order."""
    if mine.num_edges == stored.num_edges:
        for which, ntype in ((0, relation[2]), (1, relation[0])):
            ours, theirs = mine.degrees(which), stored.degrees(which)
            if not np.array_equal(ours, theirs):
                return ntype if np.array_equal(_histogram(ours), _histogram(theirs)) else None
            if relation[0] == relation[2] and ours.min() < ours.max():
                return None  # they are unchanged, so the nodes are in order
    return None


def _histogram(degrees: np.ndarray) -> np.ndarray:
    return np.bincount(np.clip(degrees, 0, _DEGREES))


def _shared_relations(graph: Any, stores: Sequence[FeatureStore]) -> Pairs:
    """(relation, graph's edges, dataset's edges) for common relations with equal numbers of nodes."""
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
                if counts == (stored.num_src, stored.num_dst) and stored.num_edges:
                    yield relation, _topology_of(graph, relation), _Compressed.of(stored)


def _topology_of(graph: Any, relation: Relation) -> _Topology:
    """Edges in a format that DGL has already made."""
    part = graph[relation]
    made = part.formats()["created"]
    counts = part.num_nodes(relation[0]), part.num_nodes(relation[2])
    if "csc" in made or "coo" not in made:
        by = "csc" if "csc" in made else "csr"
        indptr, neighbors, ids = (t.numpy() for t in part.adj_tensors(by))
        return _Compressed(indptr, neighbors, ids if len(ids) else None, *counts, by_source=by == "csr")
    return _Listed(part)


class _Edges(NamedTuple):
    """int64[n] each."""

    src: np.ndarray
    dst: np.ndarray
    ids: np.ndarray

    def only(self, chosen: np.ndarray) -> _Edges:
        return _Edges(*(part[chosen] for part in self))


class _Listed:
    """Edges in the order of their ids. They are read by id, because DGL would copy its whole list."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.num_edges: int = part.num_edges()

    def sample(self) -> _Edges:
        ids = np.random.default_rng(0).integers(0, self.num_edges, _SAMPLES)
        return _Edges(*self._ends(ids), ids)

    def has(self, edges: _Edges, *, by_id: bool) -> np.ndarray:
        """bool[n]: whether these are the edges with the same ids in this graph."""
        assert by_id, "a search would pass over all edges"
        edges = edges.only((edges.ids >= 0) & (edges.ids < self.num_edges))
        src, dst = self._ends(edges.ids)
        same: np.ndarray = (src == edges.src) & (dst == edges.dst)
        return same

    def degrees(self, which: int) -> np.ndarray:
        """Degrees of destinations (0) or of sources (1)."""
        srctype, _, dsttype = self._part.canonical_etypes[0]
        counts = np.zeros(self._part.num_nodes((dsttype, srctype)[which]), np.int64)
        for start in range(0, self.num_edges, _CHUNK):
            ends = self._ends(np.arange(start, min(start + _CHUNK, self.num_edges)))
            counts += np.bincount(ends[1 - which], minlength=len(counts))
        return counts

    def _ends(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        src, dst = self._part.find_edges(torch.from_numpy(ids).to(self._part.idtype))
        return src.long().numpy(), dst.long().numpy()


class _Compressed:
    """Edges as neighbors of nodes: sources of each destination (CSC), or by_source the other way."""

    def __init__(
        self,
        indptr: np.ndarray,
        neighbors: np.ndarray,
        ids: np.ndarray | None,
        num_src: int,
        num_dst: int,
        *,
        by_source: bool = False,
    ) -> None:
        self._indptr, self._neighbors, self._ids = indptr, neighbors, ids
        self._counts, self._by_source = (num_dst, num_src), by_source
        self.num_edges = len(neighbors)

    @classmethod
    def of(cls, graph: Graph) -> _Compressed:
        return cls(graph.indptr, graph.indices, graph.edge_ids, graph.num_src, graph.num_dst)

    def sample(self) -> _Edges:
        rng = np.random.default_rng(0)
        count = len(self._indptr) - 1
        starts = rng.integers(0, max(1, count - _WINDOW_NODES), _WINDOWS)
        nodes = np.unique(np.minimum(starts[:, None] + np.arange(_WINDOW_NODES), count - 1))
        first, degrees = self._extents(nodes)
        chosen = np.flatnonzero(degrees > 0)
        if len(chosen) >= _FEWEST:
            chosen = rng.permutation(chosen)[:_SAMPLES]
            nodes, positions = nodes[chosen], first[chosen] + rng.integers(0, degrees[chosen])
        else:  # few nodes have edges
            positions = rng.integers(0, self.num_edges, _SAMPLES)
            nodes = np.searchsorted(self._indptr, positions, side="right") - 1
        others = self._neighbors[positions].astype(np.int64)
        ids = positions if self._ids is None else self._ids[positions].astype(np.int64)
        return _Edges(nodes, others, ids) if self._by_source else _Edges(others, nodes, ids)

    def has(self, edges: _Edges, *, by_id: bool) -> np.ndarray:
        """bool[m] for the edges whose node has few enough neighbors to search. by_id: with the same id."""
        nodes, others = (edges.src, edges.dst) if self._by_source else (edges.dst, edges.src)
        first, degrees = self._extents(nodes)
        searched = np.flatnonzero(degrees <= _LONGEST)
        lengths = degrees[searched]
        owners = np.repeat(searched, lengths)
        ends = np.cumsum(lengths)
        positions = np.arange(len(owners)) + np.repeat(first[searched] - (ends - lengths), lengths)
        hit = self._neighbors[positions] == others[owners]
        if by_id:
            hit &= (positions if self._ids is None else self._ids[positions]) == edges.ids[owners]
        return np.bincount(owners[hit], minlength=len(nodes))[searched] > 0

    def degrees(self, which: int) -> np.ndarray:
        """Degrees of destinations (0) or of sources (1)."""
        if (which == 1) == self._by_source:
            return np.diff(self._indptr)
        counts = np.zeros(self._counts[which], np.int64)
        for start in range(0, self.num_edges, _CHUNK):
            ids = np.clip(
                self._neighbors[start : start + _CHUNK], 0, len(counts) - 1
            )  # a file may be damaged
            counts += np.bincount(ids, minlength=len(counts))
        return counts

    def _extents(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First position and number of the neighbors of nodes; none if the file is damaged there."""
        first, end = self._indptr[nodes].astype(np.int64), self._indptr[nodes + 1].astype(np.int64)
        sound = (first >= 0) & (end >= first) & (end <= self.num_edges)
        return np.where(sound, first, 0), np.where(sound, end - first, 0)


_Topology = _Listed | _Compressed
Pairs = Iterator[tuple[Relation, _Topology, _Compressed]]
