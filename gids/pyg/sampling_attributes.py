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
_LEAST_WEIGHT = np.finfo(np.float32).tiny
"""In place of 0: PyG, unlike gids.sampler.Neighbor, samples edges of weight 0 if a node has no more edges
than the fanout, or no others are left. -ln(u) is in 2**-54 to 38, so weights above 1e-20 come first."""


def with_times(
    graphs: Sequence[Graph], attribute: str, find: Callable[[str | Relation, str], Any], name: str
) -> tuple[list[Graph], By]:
    """The graphs with the times of this name, sorted by them, and whose times they are.

    find: returns an attribute of a type of nodes or edges, or None. A graph that is not in the order of
    these times is copied: about 24 bytes per edge. Raises KeyError if nothing has such times, ValueError if
    both nodes and edges have or if there is not one time each, TypeError for times that are not integers.
    """
    kinds: list[By] = ["edges", "nodes"]
    stored = [by for by in kinds if any(times_of(g, by) is not None for g in graphs)]
    if attribute == STORED and len(stored) == 1:
        return [_sorted(g, stored[0]) for g in graphs], stored[0]
    counts: dict[str | Relation, int] = {}
    for graph in graphs:
        src, _, dst = graph.relation
        counts |= {src: graph.num_src, dst: graph.num_dst, graph.relation: graph.num_edges}
    times = {t: _times(find(t, attribute), count, t, attribute) for t, count in counts.items()}
    nodes_have, edges_have = (
        any(values is not None and isinstance(t, kind) for t, values in times.items())
        or (attribute == STORED and len(stored) == 2)
        for kind in (str, tuple)
    )
    if nodes_have == edges_have:
        which, error = ("both", ValueError) if nodes_have else ("neither", MissingError)
        joint = "and" if nodes_have else "nor"
        raise error(
            f"time_attr={attribute!r}: {which} nodes {joint} edges of {name} have an attribute of that name"
        )
    timed = []
    for graph in graphs:
        src, _, dst = graph.relation
        if nodes_have:
            timed.append(replace(graph, src_times=times[src], dst_times=times[dst], sorted_by=None))
        else:
            edge_times = times[graph.relation]
            if edge_times is not None and graph.edge_ids is not None:
                edge_times = edge_times[graph.edge_ids]
            timed.append(replace(graph, edge_times=edge_times, sorted_by=None))
    by: By = "nodes" if nodes_have else "edges"
    return [_sorted(graph, by) for graph in timed], by


def weights_of(
    graphs: Sequence[Graph], attribute: str, find: Callable[[str | Relation, str], Any], name: str
) -> Weights:
    """The weights of the relations that have an attribute of this name. find: as of with_times.

    Raises KeyError if no relation has one, TypeError and ValueError for weights that are not one number each.
    """
    by_relation = {}
    for graph in graphs:
        weights = find(graph.relation, attribute)
        if weights is not None:
            by_relation[graph.relation] = _in_order(graph, weights, attribute)
    if not by_relation:
        raise MissingError(f"weight_attr={attribute!r}: {name} has no edges with an attribute of that name")
    return by_relation


def _sorted(graph: Graph, by: By) -> Graph:
    return graph if times_of(graph, by) is None else sort_by_time(graph, by)


def _times(values: Any, count: int, type_: str | Relation, attribute: str) -> np.ndarray | None:
    """int64[count] on the host. Raises TypeError, ValueError."""
    if values is None:
        return None
    times = on_host(torch.as_tensor(values).detach())
    if times.is_floating_point() or times.is_complex() or times.dtype == torch.bool:
        raise TypeError(f"{attribute!r} of {describe_type(type_)} is {times.dtype}; times must be integers")
    _check_count(times, count, type_, attribute)
    return times.reshape(-1).to(torch.int64).numpy()


def _in_order(graph: Graph, weights: object, attribute: str) -> np.ndarray:
    """Reorder weights by edge id to the order of graph.indices. Raises TypeError, ValueError."""
    what = f"{attribute!r} of {describe_type(graph.relation)}"
    if isinstance(weights, torch.Tensor) and weights.dtype == torch.bool:
        raise TypeError(f"{what} is bool; weights must be numbers: give 1 and 0 (`gids convert --dtype`)")
    if not isinstance(weights, torch.Tensor) or weights.is_complex():
        raise TypeError(f"{what} is not a tensor of numbers; weight_attr must name the weights of edges")
    _check_count(weights, graph.num_edges, graph.relation, attribute)
    by_id = on_host(weights.detach()).reshape(-1).to(torch.float32).numpy()
    in_order = by_id if graph.edge_ids is None else by_id[graph.edge_ids]
    return in_order if in_order.all() else np.where(in_order == 0, _LEAST_WEIGHT, in_order)


def _check_count(values: torch.Tensor, count: int, type_: str | Relation, attribute: str) -> None:
    if values.shape[:1] != (count,) or values.numel() != count:
        raise ValueError(
            f"{attribute!r} of {describe_type(type_)} has shape {list(values.shape)}; it must have one "
            f"number for each of the {count} {'nodes' if isinstance(type_, str) else 'edges'}"
        )
