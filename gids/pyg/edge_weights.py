"""PyG's weight_attr: weights that edges are drawn by. Called by NeighborSampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gids.cuda import on_host
from gids.errors import MissingError
from gids.store import Graph
from gids.store.names import Relation, describe_type

Weights = dict[Relation, np.ndarray]
"""By relation, if it has weights: float32[num_edges] in the order of graph.indices."""


def weights_of(
    graphs: Sequence[Graph], attribute: str, find: Callable[[Relation], Any], name: str
) -> Weights:
    """The weights of the relations that have an attribute of this name. find: returns a relation's, or None.

    Raises KeyError if no relation has one, TypeError and ValueError for weights that are not one number each.
    """
    found = {}
    for graph in graphs:
        weights = find(graph.relation)
        if weights is not None:
            found[graph.relation] = in_order(graph, weights, attribute)
    if not found:
        raise MissingError(f"weight_attr={attribute!r}: {name} has no edges with an attribute of that name")
    return found


def in_order(graph: Graph, weights: object, attribute: str) -> np.ndarray:
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
