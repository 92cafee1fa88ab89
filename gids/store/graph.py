"""Graph: the topology of one relation, memory-mapped, as in-edges (CSC). Made by FeatureStore."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gids.store.names import Relation

_BLOCK_EDGES = 1 << 20


@dataclass(frozen=True)
class Graph:
    """In-edges of one relation (source type, relation, destination type).

    indptr: int64[num_dst + 1]. indices: int32 or int64[num_edges]; the sources of destination v are at
    indptr[v]:indptr[v + 1]. edge_ids: the id of each edge in that order, or None if ids are positions.

    edge_times: int32 or int64[num_edges] in the order of indices; src_times, dst_times: the same for the
    nodes at the ends; None: there are none. sorted_by: "edges" if the edges of every destination are in the
    order of edge_times, "nodes" if in that of src_times[indices], None: not known.

    All are read-only memory maps. `gids verify` checks their values; opening does not.
    """

    relation: Relation
    num_src: int
    num_dst: int
    indptr: np.ndarray
    indices: np.ndarray
    edge_ids: np.ndarray | None
    edge_times: np.ndarray | None = None
    src_times: np.ndarray | None = None
    dst_times: np.ndarray | None = None
    sorted_by: str | None = None
    edge_count: int | None = None
    """The number of edges, if they are not in `indices`: other processes have them, and edge_ids is None."""

    @property
    def num_edges(self) -> int:
        return len(self.indices) if self.edge_count is None else self.edge_count


def first_out_of_order(graph: Graph, by: str) -> int | None:
    """The first position whose edge is earlier than the one before it at the same destination, or None.

    by: "edges" or "nodes", whose times the graph must have. Reads all edges, block by block.
    """
    begins = np.zeros(graph.num_edges + 1, bool)
    begins[graph.indptr] = True
    for first in range(0, graph.num_edges, _BLOCK_EDGES):
        last = min(first + _BLOCK_EDGES + 1, graph.num_edges)  # one more, to compare with
        if by == "edges":
            assert graph.edge_times is not None
            times = graph.edge_times[first:last]
        else:
            assert graph.src_times is not None
            times = graph.src_times[graph.indices[first:last]]
        bad = np.flatnonzero((times[1:] < times[:-1]) & ~begins[first + 1 : last])
        if len(bad):
            return first + 1 + int(bad[0])
    return None
