"""One graph over the nodes of all types, each edge in both directions. Called by run.py.

For graphs of several types, and for METIS. The id of a node is its id within its type plus the number of
nodes of the types before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gids.store.files import map_array
from gids.store.names import RELATION, Relation
from gids.write.edge_sort import EDGE_BYTES
from gids.write.edges import Edges, EdgeSource, in_edges
from gids.write.graph_writer import GraphWriter
from gids.write.row_order import InEdges


@dataclass(frozen=True)
class StoredGraph:
    """The topology of a relation, memory-mapped."""

    relation: Relation
    num_src: int
    indptr: np.ndarray
    indices: np.ndarray


def union_bytes(edge_count: int) -> int:
    """Disk space for a union of this many edges, while it is sorted."""
    return 2 * edge_count * (2 * EDGE_BYTES + 8)


def union_graph(
    graphs: Sequence[StoredGraph],
    starts: Mapping[str, int],
    node_count: int,
    scratch: Path,
    *,
    memory_bytes: int,
    workers: int,
    simple: bool = False,
) -> InEdges:
    """(indptr, indices) of the union, memory-mapped from files in scratch.

    starts: the id of the first node of each type. simple: without loops and repeated edges.
    """

    def pieces(block_bytes: int) -> Iterator[Edges]:
        # One direction after the other: the order of edges must not depend on the size of blocks.
        for graph, forward in itertools.product(graphs, (True, False)):
            source, _, destination = graph.relation
            found = in_edges(
                graph.indptr, graph.indices, None, num_src=graph.num_src, num_dst=len(graph.indptr) - 1
            )
            for src, dst, _ in found.pieces(block_bytes):
                a, b = src + starts[source], dst + starts[destination]
                if simple:
                    a, b = a[a != b], b[a != b]
                yield *((a, b) if forward else (b, a)), np.zeros(len(a), np.int64)

    count = 2 * sum(len(graph.indices) for graph in graphs)
    if simple:
        count -= 2 * sum(_loops(graph) for graph in graphs)
    edges = EdgeSource(count, node_count, node_count, pieces)
    with GraphWriter(
        scratch,
        RELATION,
        num_src=node_count,
        num_dst=node_count,
        edge_count=count,
        index_dtype="int64",
        keep_ids=False,
        on_bytes=lambda _: None,
        dedup=simple,
    ) as files:
        entries = files.write_sorted(edges, scratch, memory_bytes, sort_neighbors=False, workers=workers)
    indptr, indices = (map_array(scratch / entries[r].path, entries[r]) for r in ("indptr", "indices"))
    return indptr, indices


def _loops(graph: StoredGraph) -> int:
    """The number of edges from a node to itself."""
    if graph.relation[0] != graph.relation[2]:
        return 0
    loops, step = 0, 1 << 18
    for start in range(0, len(graph.indptr) - 1, step):
        bounds = graph.indptr[start : start + step + 1]
        nodes = np.arange(start, start + len(bounds) - 1)
        loops += int((np.repeat(nodes, np.diff(bounds)) == graph.indices[bounds[0] : bounds[-1]]).sum())
    return loops
