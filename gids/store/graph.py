"""Graph: the topology of one relation, memory-mapped, as in-edges (CSC). Made by FeatureStore."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gids.store.names import Relation


@dataclass(frozen=True)
class Graph:
    """In-edges of one relation (source type, relation, destination type).

    indptr: int64[num_dst + 1]. indices: int32 or int64[num_edges]; the sources of destination v are at
    indptr[v]:indptr[v + 1]. edge_ids: the id of each edge in that order, or None if ids are positions.
    All are read-only memory maps. `gids verify` checks their values; opening does not.
    """

    relation: Relation
    num_src: int
    num_dst: int
    indptr: np.ndarray
    indices: np.ndarray
    edge_ids: np.ndarray | None

    @property
    def num_edges(self) -> int:
        return len(self.indices)
