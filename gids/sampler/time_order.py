"""The order of a graph's edges by time, on which temporal sampling relies. Called by Topology and users."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from gids.store import Graph
from gids.store.graph import first_out_of_order
from gids.store.names import describe_type

By = Literal["edges", "nodes"]
"""Whose times bound the neighbors: those of the edges, or those of their sources."""


def times_of(graph: Graph, by: By) -> np.ndarray | None:
    """int32 or int64[num_edges], or [num_src]; None if the graph has no such times."""
    return graph.edge_times if by == "edges" else graph.src_times


def check_time_order(graph: Graph, by: By) -> None:
    """Raise ValueError if the edges of a destination are not in the order of their times.

    Reads all edges, unless the graph is from a dataset that is sorted in this way.
    """
    if graph.sorted_by == by or times_of(graph, by) is None:
        return
    position = first_out_of_order(graph, by)
    if position is not None:
        raise ValueError(
            f"the edges of {describe_type(graph.relation)} are not sorted by the times of {by} (at position "
            f"{position}): sort the graph with gids.sampler.sort_by_time(graph, {by!r})"
        )


def sort_by_time(graph: Graph, by: By) -> Graph:
    """The graph with each destination's edges in the order of time: `by` "edges" or "nodes".

    Edges of equal times keep their order and their ids. Takes about 40 bytes of memory per edge; of a graph
    that is in this order already no array is copied. Raises ValueError if the graph has no such times.
    """
    times = times_of(graph, by)
    if times is None:
        raise ValueError(
            f"{describe_type(graph.relation)} has no times of {by}: use dataclasses.replace(graph, "
            f"{'edge_times' if by == 'edges' else 'src_times'}=…)"
        )
    if graph.sorted_by == by or first_out_of_order(graph, by) is None:
        return replace(graph, sorted_by=by)
    of_edges = times if by == "edges" else times[graph.indices]
    destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
    order = np.lexsort([of_edges, destinations])
    return replace(
        graph,
        indices=graph.indices[order],
        edge_ids=order if graph.edge_ids is None else graph.edge_ids[order],
        edge_times=None if graph.edge_times is None else graph.edge_times[order],
        sorted_by=by,
    )
