"""PyG's time_attr: times of nodes or edges, by which neighbors are bounded. Called by NeighborSampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gids.cuda import on_host
from gids.errors import MissingError
from gids.sampler import sort_by_time
from gids.sampler.time_order import By, times_of
from gids.store import Graph
from gids.store.graph import first_out_of_order
from gids.store.names import Relation, describe_type

STORED = "time"
"""PyG's name of the times that `gids convert` stores."""


def with_times(
    graphs: Sequence[Graph], attribute: str, find: Callable[[str | Relation, str], Any], name: str
) -> tuple[list[Graph], By]:
    """The graphs with the times of this name, sorted by them, and whose times they are.

    find: returns an attribute of a type of nodes or edges, or None. A graph that is not in the order of
    these times is copied: about 24 bytes per edge. Raises KeyError if nothing has such times, ValueError if
    both nodes and edges have, TypeError for times that are not one integer each.
    """
    kinds: list[By] = ["edges", "nodes"]
    stored = [by for by in kinds if any(times_of(g, by) is not None for g in graphs)]
    if attribute == STORED and len(stored) == 1:
        return [_sorted(g, stored[0]) for g in graphs], stored[0]
    types = dict.fromkeys(t for g in graphs for t in (g.relation[0], g.relation[2]))
    of_nodes = {t: _numbers(find(t, attribute), t, attribute) for t in types}
    of_edges = {g.relation: _numbers(find(g.relation, attribute), g.relation, attribute) for g in graphs}
    found = [of for of in (of_nodes, of_edges) if any(times is not None for times in of.values())]
    if len(found) != 1:
        which = "both nodes and edges" if found else "neither nodes nor edges"
        error = ValueError if found else MissingError
        raise error(f"time_attr={attribute!r}: {which} of {name} have an attribute of that name")
    if found[0] is of_nodes:
        timed = [
            replace(g, src_times=of_nodes[g.relation[0]], dst_times=of_nodes[g.relation[2]], sorted_by=None)
            for g in graphs
        ]
        return [_sorted(g, "nodes") for g in timed], "nodes"
    return [_sorted(_with_edge_times(g, of_edges[g.relation]), "edges") for g in graphs], "edges"


def node_times(graphs: Sequence[Graph]) -> dict[str, torch.Tensor]:
    """The times of nodes, by type, if the graphs have them: int64[num_nodes]."""
    found: dict[str, torch.Tensor] = {}
    for graph in graphs:
        for ntype, times in ((graph.relation[0], graph.src_times), (graph.relation[2], graph.dst_times)):
            if times is not None and ntype not in found:
                found[ntype] = torch.from_numpy(np.array(times, np.int64))
    return found


def _sorted(graph: Graph, by: By) -> Graph:
    if times_of(graph, by) is None or graph.sorted_by == by:
        return graph
    if first_out_of_order(graph, by) is None:
        return replace(graph, sorted_by=by)
    return sort_by_time(graph, by)


def _with_edge_times(graph: Graph, by_id: np.ndarray | None) -> Graph:
    times = by_id if by_id is None or graph.edge_ids is None else by_id[graph.edge_ids]
    return replace(graph, edge_times=times, sorted_by=None)


def _numbers(given: Any, type_: str | Relation, attribute: str) -> np.ndarray | None:
    if given is None:
        return None
    times = on_host(torch.as_tensor(given).detach())
    if times.is_floating_point() or times.is_complex() or times.dtype == torch.bool:
        raise TypeError(f"{attribute!r} of {describe_type(type_)} is {times.dtype}; times must be integers")
    if times.numel() != len(times):
        raise TypeError(f"{attribute!r} of {describe_type(type_)} has shape {list(times.shape)}; give [n]")
    return times.reshape(-1).to(torch.int64).numpy()
