"""Samplers of gids, and one of a user that calls another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torture_data import PAPERS, TortureData

from gids.sampler import Labor, Ladies, LocalityBias, Minibatch, Neighbor, RandomWalk


def _weights(data: TortureData, *, by_id: bool = False) -> Any:
    found = {relation: torch.arange(edges.shape[1]) % 7 + 0.5 for relation, edges in data.edges.items()}
    if by_id:
        found = {relation: w[np.argsort(data.edge_ids[relation])] for relation, w in found.items()}
    return found if data.typed else next(iter(found.values()))


def weighted_by_id(data: TortureData) -> Neighbor:
    """The sampler "weighted", for a dataset in parts."""
    return Neighbor([3, 4], weights=_weights(data, by_id=True))


def _locality(data: TortureData) -> LocalityBias:
    mask = torch.arange(PAPERS) % 5 == 0
    return LocalityBias({"paper": mask} if data.typed else mask, 4)


class Wrapped:
    """A user's sampler that calls another one with the same numbers."""

    def __init__(self, inner: Neighbor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Wrapped({self.inner!r})"

    def sample(self, graphs: Any, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0) -> Minibatch:
        return self.inner.sample(graphs, seeds, seed=seed, epoch=epoch, step=step)


OWN: dict[str, Callable[[TortureData], Any]] = {
    "neighbor": lambda data: Neighbor([3, 4]),
    "fanouts": lambda data: [4, 3],
    "a user's": lambda data: Wrapped(Neighbor([3, 4])),
    "dependent": lambda data: Neighbor([3, 4], batch_dependency=8),
    "replace": lambda data: Neighbor([3, 4], replace=True),
    "weighted": lambda data: Neighbor([3, 4], weights=_weights(data)),
    "all": lambda data: Neighbor([-1, 2]),
    "locality": lambda data: Neighbor([3, 4], locality=_locality(data)),
    "disjoint": lambda data: Neighbor([2, 2], disjoint=True),
    "temporal": lambda data: Neighbor([3, 2], temporal="nodes"),
    "induced": lambda data: Neighbor([3, 2], subgraph="induced"),
    "labor": lambda data: Labor([3, 4], batch_dependency=4),
    "nested": lambda data: Labor([3, 4], batch_dependency=4, nested=True),
    "labor-*": lambda data: Labor([3, 4], importance_sampling=-1, batch_dependency=math.inf),
    "ladies": lambda data: Ladies([90, 50]),
    "poisson": lambda data: Ladies([90, 50], poisson=True),
    "walks": lambda data: RandomWalk([3, 3]),
}
TYPED_SAMPLERS = {*OWN} - {"walks", "temporal"}
"""Samplers that are drawn for several node types, of which only one has times."""
EDGE_SAMPLERS = [name for name in OWN if name not in ("walks", "induced", "temporal")]
PYG_SAMPLERS = ["neighbor", "replace", "disjoint", "induced"]
ON_DEVICE = {*OWN} - {"induced", "walks", "labor-*", "ladies", "poisson"}
OTHER_EDGES = {"induced", "walks"}
"""Samplers whose blocks may have edges that the graph does not have, or not once."""
