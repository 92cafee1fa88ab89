"""Graph: one relation's topology, memory-mapped, as in-edges by destination (CSC). Made by FeatureStore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gids.store.names import Relation
from gids.store.pinned_graph import PinnedGraph

if TYPE_CHECKING:
    from gids.cuda import Device


@dataclass(frozen=True)
class Graph:
    """In-edges of one relation (source type, relation, destination type).

    indptr: int64[num_dst + 1]; indices: int32 or int64[num_edges], the sources of destination v at
    indptr[v]:indptr[v + 1]; edge_ids: the id of each edge in that order, or None when it is the position.
    All are read-only memory maps; `gids verify` checks their values, opening does not.
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

    def pin(self, device: Device, *, place: str = "auto") -> PinnedGraph:
        """Copy the topology to where a GPU reads it in place, for sampling there. Blocks while it copies.

        device: of `gids.cuda.open_device`. place: "host": indptr and indices in pinned host memory; "indptr":
        that in device memory; "device": both there; "auto": the last of these that takes at most an eighth of
        the free device memory. edge_ids stay where they are.

        Raises MemoryError when host or device memory is short, RuntimeError when the driver refuses to pin.
        """
        if place not in ("auto", "host", "indptr", "device"):
            raise ValueError(f"place={place!r}; it must be one of auto, host, indptr, device")
        return PinnedGraph(self, device, place)
