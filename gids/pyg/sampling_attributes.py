"""PyG's time_attr and weight_attr: attributes that sampling depends on. Called by NeighborSampler."""

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
from gids.store.names import Relation, describe_type

STORED = "time"
"""PyG's name of the times that `gids convert` stores."""
Weights = dict[Relation, np.ndarray]
"""By relation, if it has weights: float32[num_edges] in the order of graph.indices."""


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
    nodes_have, edges_have = (any(t is not None for t in times.values()) for times in (of_nodes, of_edges))
    if nodes_have == edges_have:
        which, error = ("both", ValueError) if nodes_have else ("neither", MissingError)
        joint = "and" if nodes_have else "nor"
        raise error(
            f"time_attr={attribute!r}: {which} nodes {joint} edges of {name} have an attribute of that name"
        )
    if nodes_have:
        timed = [
            replace(g, src_times=of_nodes[g.relation[0]], dst_times=of_nodes[g.relation[2]], sorted_by=None)
            for g in graphs
        ]
        return [_sorted(g, "nodes") for g in timed], "nodes"
    timed = []
    for graph in graphs:
        times = of_edges[graph.relation]
        if times is not None and graph.edge_ids is not None:
            times = times[graph.edge_ids]
        timed.append(_sorted(replace(graph, edge_times=times, sorted_by=None), "edges"))
    return timed, "edges"


def node_times(graphs: Sequence[Graph]) -> dict[str, torch.Tensor]:
    """The times of nodes, by type, if the graphs have them: int64[num_nodes]."""
    by_type: dict[str, torch.Tensor] = {}
    for graph in graphs:
        for ntype, times in ((graph.relation[0], graph.src_times), (graph.relation[2], graph.dst_times)):
            if times is not None and ntype not in by_type:
                by_type[ntype] = torch.from_numpy(np.array(times, np.int64))
    return by_type


def weights_of(
    graphs: Sequence[Graph], attribute: str, find: Callable[[Relation], Any], name: str
) -> Weights:
    """The weights of the relations that have an attribute of this name. find: returns a relation's, or None.

    Raises KeyError if no relation has one, TypeError and ValueError for weights that are not one number each.
    """
    by_relation = {}
    for graph in graphs:
        weights = find(graph.relation)
        if weights is not None:
            by_relation[graph.relation] = _in_order(graph, weights, attribute)
    if not by_relation:
        raise MissingError(f"weight_attr={attribute!r}: {name} has no edges with an attribute of that name")
    return by_relation


def _sorted(graph: Graph, by: By) -> Graph:
    return graph if times_of(graph, by) is None else sort_by_time(graph, by)


def _numbers(values: Any, type_: str | Relation, attribute: str) -> np.ndarray | None:
    if values is None:
        return None
    times = on_host(torch.as_tensor(values).detach())
    if times.is_floating_point() or times.is_complex() or times.dtype == torch.bool:
        raise TypeError(f"{attribute!r} of {describe_type(type_)} is {times.dtype}; times must be integers")
    if times.numel() != len(times):
        raise TypeError(f"{attribute!r} of {describe_type(type_)} has shape {list(times.shape)}; give [n]")
    return times.reshape(-1).to(torch.int64).numpy()


def _in_order(graph: Graph, weights: object, attribute: str) -> np.ndarray:
    """Reorder weights by edge id to the order of graph.indices. Raises TypeError, ValueError."""
    what = f"{attribute!r} of {describe_type(graph.relation)}"
    if isinstance(weights, torch.Tensor) and weights.dtype == torch.bool:
        raise TypeError(f"{what} is bool; weights must be numbers: give 1 and 0 (`gids convert --dtype`)")
    if not isinstance(weights, torch.Tensor) or weights.is_complex():
        raise TypeError(f"{what} is not a tensor of numbers; weight_attr must name the weights of edges")
    if weights.numel() != graph.num_edges or len(weights) != graph.num_edges:
        raise ValueError(
            f"{what} has shape {list(weights.shape)}; weight_attr must name one number for each of the "
            f"{graph.num_edges} edges"
        )
    by_id = on_host(weights.detach()).reshape(-1).to(torch.float32).numpy()
    return by_id if graph.edge_ids is None else by_id[graph.edge_ids]
