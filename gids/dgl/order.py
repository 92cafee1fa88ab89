"""Whether ids of nodes and edges are the dataset's: those of the loader's graph, and of each sampled graph.

dgl.reorder_graph changes ids, but not the numbers of nodes and edges; a sampler that samples from a sampled
graph leaves ids of that one in dgl.NID and dgl.EID. Minibatches would get the rows of other nodes. Edges show
it: those of a minibatch must be edges of the loader's graph, and those of the graph edges of the dataset.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from dgl import EID, NID
from torch import Tensor

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import FeatureStore, Graph, Table
from gids.store.names import Relation, describe_type
from gids.store.numbering import numbering_of

_SAMPLES = 1000
_MINIBATCH_SAMPLES = 64
"""Edges of a sampled graph's relation that are looked up. If 1 in 10 is wrong, 1 minibatch in 800 passes."""
_NEIGHBORS = 1 << 20
"""Most neighbors that are searched: about 30 MB."""
_CHUNK = 1 << 24


def check_order(table: Table, graph: Any, stores: Sequence[FeatureStore]) -> None:
    """Raise ValueError if the graph's nodes (edges) are in another order than the table's rows.

    Its dgl.NID (dgl.EID), if it has any, must be 0, 1, 2, … Else up to 1,000 edges of each relation of the
    nodes must be in the topology of the stores; of the edges, with the same ids.
    """
    by_id = table.kind == "edge"
    name, key = ("EID", EID) if by_id else ("NID", NID)
    own = getattr(graph, f"{table.kind}s")[table.type].data.get(key)
    if own is not None:
        proof = "" if _is_identity(own) else f"dgl.{name} has their old ids"
    else:
        relations = [r for r in graph.canonical_etypes if table.type in ([r] if by_id else r[::2])]
        proofs = (_proof(graph, relation, stores, by_id) for relation in relations)
        proof = next(filter(None, proofs), "")
    if proof:
        raise ValueError(
            f"the graph's {table.kind}s are in another order than the rows of {table.name!r}, as after "
            f"dgl.reorder_graph ({proof}): give the loader the graph from before the reordering; or, if its "
            f"{table.kind}s have the ids of {table.dataset} all the same, say so: graph.{table.kind}s"
            f"[{table.type!r}].data[dgl.{name}] = torch.arange({table.row_count})"
        )


def _proof(graph: Any, relation: Relation, stores: Sequence[FeatureStore], by_id: bool) -> str:
    """What shows that edges of the graph are not in the first store that has them. Nothing where they cannot
    be compared. Raises ValueError if that store numbers the nodes otherwise than the first one."""
    store = next((s for s in stores if (n := s.numbering(relation)) and n.contents), None)
    if store is None:
        return ""
    for ntype in relation[::2]:
        if (first := numbering_of(stores, ntype)) is not None and first != store.numbering(ntype):
            raise ValueError(
                f"{store.name} has the edges, and {first.dataset} numbers nodes otherwise: "
                f"give {store.name} first"
            )
    if graph.device.type != "cpu":
        return ""
    stored = store.graph(relation)
    own = _topology(graph, relation)
    if (own.num_src, own.num_dst) != (stored.num_src, stored.num_dst):
        return ""
    chosen = _positions(own.num_edges, _SAMPLES)
    destinations = np.searchsorted(own.indptr, chosen, side="right") - 1
    ids = chosen if own.edge_ids is None else own.edge_ids[chosen]
    are_edges = _are_edges(own.indices[chosen], destinations, ids, stored, by_id=by_id)
    if are_edges.all():
        return ""
    return (
        f"{are_edges.sum()} of {len(are_edges)} sampled edges of {describe_type(relation)} "
        f"({are_edges.mean():.1%}) are in {store.name}{' with the same ids' if by_id else ''}"
    )


def check_sampled_ids(sampled: Any, graph: Any, types: Collection[Any]) -> None:
    """Raise ValueError if dgl.NID of a sampled graph, or dgl.EID of a relation in ``types``, has
    other ids than the loader's graph.

    Up to 64 edges of each relation must be edges of the loader's graph. A graph on a GPU is not checked.
    """
    if sampled.device.type != "cpu" or graph.device.type != "cpu":
        return
    for relation in filter(sampled.num_edges, sampled.canonical_etypes):
        by_id = relation in types
        # order=None: of whatever format it has.
        src, dst, ids = (x.numpy() for x in sampled.edges(form="all", order=None, etype=relation))
        chosen = _positions(len(ids), _MINIBATCH_SAMPLES)
        src = ids_of("node", relation[0], sampled.srcnodes[relation[0]].data).numpy()[src[chosen]]
        dst = ids_of("node", relation[2], sampled.dstnodes[relation[2]].data).numpy()[dst[chosen]]
        ids = sampled.edges[relation].data[EID].numpy()[ids[chosen]] if by_id else ids[chosen]
        are_edges = np.zeros(1, bool)
        if relation in graph.canonical_etypes:
            own = _topology(graph, relation)
            if src.max() < own.num_src and dst.max() < own.num_dst:
                are_edges = _are_edges(src, dst, ids, own, by_id=by_id)
        if not are_edges.all():
            raise ValueError(
                f"a sampled graph has edges of {describe_type(relation)} that are not in the loader's graph"
                f"{' with these ids' if by_id else ''}: dgl.NID{' or dgl.EID' if by_id else ''} may have ids "
                "of another graph. A sampler that samples from a sampled graph must set them to ids of the "
                "loader's graph. One that adds edges must mark columns with ids: dgl.LazyFeature(name, ids)"
            )


def ids_of(kind: str, type_: Any, data: Any) -> Tensor:
    """dgl.NID or dgl.EID in a sampled graph's data. Raises KeyError if it has none."""
    if (ids := data.get(NID if kind == "node" else EID)) is None:
        raise MissingError(
            f"a sampled graph has no dgl.{'NID' if kind == 'node' else 'EID'} of {kind} type {type_!r}, so "
            "its rows are unknown: let the sampler keep it"
        )
    return ids  # type: ignore[no-any-return]


def _topology(graph: Any, relation: Relation) -> Graph:
    """A relation of a DGLGraph, by destination; in one type by source, if DGL has made that alone: its edges
    are reversed then."""
    part = graph[relation]
    made = part.formats()["created"]
    by = "csr" if made == ["csr"] and relation[0] == relation[2] else "csc"
    indptr, indices, ids = (array.numpy() for array in part.adj_tensors(by))
    counts = graph.num_nodes(relation[0]), graph.num_nodes(relation[2])
    return Graph(relation, *counts, indptr, indices, ids if len(ids) else None)


def _positions(count: int, most: int) -> np.ndarray:
    """All, or as many at random, always the same ones."""
    return np.arange(count) if count <= most else np.random.default_rng(0).integers(0, count, most)


def _is_identity(ids: Tensor) -> bool:
    return all(
        torch.equal(on_host(part).long(), torch.arange(start, start + len(part)))
        for start, part in zip(range(0, len(ids), _CHUNK), torch.split(ids, _CHUNK), strict=False)
    )


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
    return np.compress(hit | searched, hit)


def _search(
    src: np.ndarray, dst: np.ndarray, ids: np.ndarray, stored: Graph, by_id: bool
) -> tuple[np.ndarray, np.ndarray]:
    """bool[n] each: whether an edge is among those of its destination, and whether these were searched:
    the shortest lists of neighbors, up to _NEIGHBORS together."""
    first, end = (stored.indptr[nodes].astype(np.int64) for nodes in (dst, dst + 1))
    lists = np.argsort(end - first, kind="stable")
    lists = lists[(end - first)[lists].cumsum() <= _NEIGHBORS]
    lengths = (end - first)[lists]
    owners = np.repeat(lists, lengths)
    positions = np.arange(len(owners)) + np.repeat(first[lists] - (lengths.cumsum() - lengths), lengths)
    hits = stored.indices[positions] == src[owners]
    if by_id:
        hits &= (positions if stored.edge_ids is None else stored.edge_ids[positions]) == ids[owners]
    hit, searched = np.zeros(len(dst), bool), np.zeros(len(dst), bool)
    hit[owners[hits]], searched[lists] = True, True
    return hit, searched
