"""PyG's num_neighbors for the relations of a graph. Called by NeighborLoader and NeighborSampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch_geometric.sampler import NumNeighbors

from gids.pyg.hops import Counts
from gids.store.names import Relation


def counts_of(given: Counts | NumNeighbors, relations: Sequence[Relation] | None) -> Counts:
    """By relation; one list if relations is None, for a homogeneous graph. Raises TypeError, ValueError."""
    if relations is None:
        hops = given.values if isinstance(given, NumNeighbors) else given
        if not isinstance(hops, list | tuple):
            raise TypeError(f"num_neighbors={given!r}; with one edge type give a list, a number per hop")
        return _plain(hops)
    if not isinstance(given, NumNeighbors | list | tuple | dict):
        raise TypeError(f"num_neighbors={given!r}; give a list, a number per hop, or such lists by edge type")
    numbers = given if isinstance(given, NumNeighbors) else NumNeighbors(given)
    return {relation: _plain(hops) for relation, hops in numbers.get_values(list(relations)).items()}


def _plain(hops: Sequence[int]) -> list[int]:
    return [int(n) if isinstance(n, np.integer) else n for n in hops]
