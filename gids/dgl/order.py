"""Whether ids of nodes and edges are the dataset's: those of the loader's graph, and of each sampled graph.

dgl.reorder_graph changes ids, but not the numbers of nodes and edges; a sampler that samples from a sampled
graph leaves ids of that one in dgl.NID and dgl.EID. Minibatches would get the rows of other nodes. Edges show
it: those of a minibatch must be edges of the loader's graph, and those of the graph edges of the dataset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from dgl import EID, NID

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import FeatureStore, Graph, Table
from gids.store.names import Relation, describe_type

_SAMPLES = 1000
_MINIBATCH_SAMPLES = 64
"""Edges of a sampled graph's relation that are looked up. If 1 in 10 is wrong, 1 minibatch in 800 passes."""
_NEIGHBORS = 1 << 20
"""Most neighbors that are searched: about 30 MB."""
_CHUNK = 1 << 24


def check_order(table: Table, graph: Any, stores: Sequence[FeatureStore]) -> None:
    """Raise ValueError if the graph's nodes (edges) are in another order than the table's rows.

    stores: the stores whose topology is compared. In each relation of the nodes all sampled edges must be in
    the dataset; in that of the edges, with the same ids. Blocks for some thousand reads of the topology.
    Ids of 0, 1, 2, … in the graph's dgl.NID (dgl.EID) say that the order is the same.
    """
    by_id = table.kind == "edge"
    name = "EID" if by_id else "NID"
    column = getattr(graph, f"{table.kind}s")[table.type].data.get(EID if by_id else NID)
    if column is not None and _is_identity(column):
        return
    proof = "" if column is None else f"dgl.{name} has their old ids"
    for store, relation, stored in _shared_relations(graph, stores):
        if table.type in ([relation] if by_id else relation[::2]):
            are_stored = _are_edges(*_sample(graph[relation], _SAMPLES), stored, by_id=by_id)
            if not are_stored.all():
                proof = (
                    f"{are_stored.sum()} of {len(are_stored)} sampled edges of {describe_type(relation)} "
                    f"({are_stored.mean():.1%}) are in {store.name}{' with the same ids' if by_id else ''}"
                )
                break
            if len(are_stored):
                proof = ""
    if proof:
        raise ValueError(
            f"the graph's {table.kind}s are in another order than the rows of {table.name!r}, as after "
            f"dgl.reorder_graph ({proof}): give the loader the graph from before the reordering; or, if its "
            f"{table.kind}s have the ids of {table.dataset} all the same, say so: graph.{table.kind}s"
            f"[{table.type!r}].data[dgl.{name}] = torch.arange({table.row_count})"
        )


def check_sampled_ids(sampled: Any, graph: Any, types: Collection[Any]) -> None:
    """Raise ValueError if dgl.NID of a sampled graph, or dgl.EID of a relation in ``types``, has
    other ids than the loader's graph.

    Up to 64 edges of each relation must be edges of the loader's graph. A graph on a GPU is not checked.
    """
    if sampled.device.type != "cpu" or graph.device.type != "cpu":
        return
    for relation in sampled.canonical_etypes:
        if not sampled.num_edges(relation):
            continue
        (src_type, _, dst_type), by_id = relation, relation in types
        src, dst, ids = _sample(sampled[relation], _MINIBATCH_SAMPLES)
        src = _node_ids(sampled.srcnodes[src_type].data, src_type)[src]
        dst = _node_ids(sampled.dstnodes[dst_type].data, dst_type)[dst]
        if by_id:
            ids = sampled.edges[relation].data[EID].numpy()[ids]
        are_edges = np.zeros(1, bool)
        if relation in graph.canonical_etypes and _are_inside(src, dst, graph, relation):
            are_edges = _are_edges(src, dst, ids, _topology(graph, relation), by_id=by_id)
        if not are_edges.all():
            raise ValueError(
                f"a sampled graph has edges of {describe_type(relation)} that are not in the loader's graph"
                f"{' with these ids' if by_id else ''}: dgl.NID{' or dgl.EID' if by_id else ''} may have ids "
                "of another graph. A sampler that samples from a sampled graph must set them to ids of the "
                "loader's graph. One that adds edges must mark columns with ids: dgl.LazyFeature(name, ids)"
            )


def missing_ids(kind: str, type_: Any) -> MissingError:
    return MissingError(
        f"a sampled graph has no dgl.{'NID' if kind == 'node' else 'EID'} of {kind} type {type_!r}, so its "
        "rows are unknown: let the sampler keep it"
    )


def _node_ids(data: Any, node_type: str) -> np.ndarray:
    if (ids := data.get(NID)) is None:
        raise missing_ids("node", node_type)
    return ids.numpy()  # type: ignore[no-any-return]


def _topology(graph: Any, relation: Relation) -> Graph:
    """A relation of a DGLGraph. Within a node type by source, if DGL has made that and not by destination."""
    part = graph[relation]
    made = part.formats()["created"]
    by = "csr" if "csr" in made and "csc" not in made and relation[0] == relation[2] else "csc"
    indptr, indices, ids = (array.numpy() for array in part.adj_tensors(by))
    return Graph(relation, *_counts(graph, relation), indptr, indices, ids if len(ids) else None)


def _is_identity(ids: torch.Tensor) -> bool:
    return all(
        torch.equal(on_host(part).long(), torch.arange(start, start + len(part)))
        for start, part in zip(range(0, len(ids), _CHUNK), ids.split(_CHUNK), strict=False)
    )


def _shared_relations(
    graph: Any, stores: Sequence[FeatureStore]
) -> Iterator[tuple[FeatureStore, Relation, Graph]]:
    """The common relations of graph and stores with equal numbers of nodes."""
    for store in stores if graph.device.type == "cpu" else ():
        for relation in graph.canonical_etypes:
            if relation in store.relations and graph.num_edges(relation):
                try:
                    stored = store.graph(relation)
                except MissingError:  # a relation of edge features alone
                    continue
                if _counts(graph, relation) == (stored.num_src, stored.num_dst):
                    yield store, relation, stored


def _are_inside(src: np.ndarray, dst: np.ndarray, graph: Any, relation: Relation) -> bool:
    return all(ids.max() < count for ids, count in zip((src, dst), _counts(graph, relation), strict=True))


def _counts(graph: Any, relation: Relation) -> tuple[int, int]:
    return graph.num_nodes(relation[0]), graph.num_nodes(relation[2])


def _sample(part: Any, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(src, dst, id) of random edges of a graph of one relation, from a format that DGL has made; all of a
    small graph."""
    count = part.num_edges()
    drawn = np.random.default_rng(0).integers(0, count, most)
    positions = np.arange(count) if count <= most else np.sort(drawn)
    made = part.formats()["created"]
    if "coo" in made and "csc" not in made:
        src, dst = part.find_edges(torch.from_numpy(positions).to(part.idtype))
        return src.long().numpy(), dst.long().numpy(), positions
    by = "csc" if "csc" in made else "csr"
    indptr, neighbors, ids = (array.numpy() for array in part.adj_tensors(by))
    nodes = np.searchsorted(indptr, positions, side="right") - 1
    others = neighbors[positions].astype(np.int64)
    ids = ids[positions].astype(np.int64) if len(ids) else positions
    return (others, nodes, ids) if by == "csc" else (nodes, others, ids)


def _are_edges(
    src: np.ndarray, dst: np.ndarray, ids: np.ndarray, stored: Graph, *, by_id: bool
) -> np.ndarray:
    """bool[m]: whether edges are in a topology, reversed in one type; m of them could be looked up."""
    one_type = stored.relation[0] == stored.relation[2]
    if one_type and not by_id:  # a loop stays a loop in any order
        src, dst, ids = (ends[src != dst] for ends in (src, dst, ids))
    hit, searched = _search(src, dst, ids, stored, by_id)
    missed = np.flatnonzero(~hit)
    if one_type and len(missed):
        hit[missed], reversed_ = _search(dst[missed], src[missed], ids[missed], stored, by_id)
        searched[missed] &= reversed_
    return hit[hit | searched]


def _search(
    src: np.ndarray, dst: np.ndarray, ids: np.ndarray, stored: Graph, by_id: bool
) -> tuple[np.ndarray, np.ndarray]:
    """bool[n] each: whether an edge is among those of its destination, and whether these were searched.

    Short lists of neighbors are searched first, up to _NEIGHBORS. Extents that cannot be right are left out,
    because a file may be damaged.
    """
    first, end = (stored.indptr[nodes].astype(np.int64) for nodes in (dst, dst + 1))
    sound = np.flatnonzero((first >= 0) & (end >= first) & (end <= stored.num_edges))
    sound = sound[np.argsort((end - first)[sound], kind="stable")]
    lists = sound[(end - first)[sound].cumsum() <= _NEIGHBORS]
    lengths = (end - first)[lists]
    owners = np.repeat(lists, lengths)
    positions = np.arange(len(owners)) + np.repeat(first[lists] - (lengths.cumsum() - lengths), lengths)
    hits = stored.indices[positions] == src[owners]
    if by_id:
        hits &= (positions if stored.edge_ids is None else stored.edge_ids[positions]) == ids[owners]
    hit, searched = np.zeros(len(dst), bool), np.zeros(len(dst), bool)
    hit[owners[hits]], searched[lists] = True, True
    return hit, searched
