"""The share of edges that begin at a node of another rank, by owners. Called by `gids scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from gids.distributed.owners import HashOwners, Owners, RangeOwners
from gids.distributed.source import OwnedBy
from gids.store import FeatureStore, Graph
from gids.write.row_order import community_order

METHODS = (*get_args(OwnedBy), "community")
_MOST_EDGES = 2_000_000  # of each relation; of more, so many are drawn


class Cut:
    """The cut of a dataset's edges. Communities are found once. Nodes have the owners of "hash" with "heat".

    Raises ValueError for an unknown method, and for communities of a dataset with several node types.
    """

    def __init__(self, store: FeatureStore, graphs: Sequence[Graph], method: str, seed: int = 0) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)} (got {method!r})")
        self._method, self._positions = method, None
        rng = np.random.default_rng(seed)
        self._ends = [(g.relation, *_edges(g, rng)) for g in graphs]
        self._counts = {t: store.num_nodes(t) for t in store.node_types}
        self._weights = [g.num_edges for g in graphs]
        if method == "community":
            if len(self._counts) > 1:
                raise ValueError(
                    f"owners by community need one node type ({store.name} has {len(self._counts)}): use "
                    "hash or range"
                )
            [ntype] = self._counts
            degrees = np.zeros(self._counts[ntype], np.int64)
            for graph in graphs:
                degrees += np.bincount(graph.indices, minlength=len(degrees))
            self._positions = community_order(
                [(g.indptr, g.indices) for g in graphs], degrees.astype(np.uint32)
            )

    def share(self, ranks: int) -> float:
        """Between 0 and 1."""
        owners = {t: self._owners(ranks, count) for t, count in self._counts.items()}
        cut = [
            float(np.mean(owners[dst].of(targets) != owners[src].of(sources))) if len(sources) else 0.0
            for (src, _, dst), targets, sources in self._ends
        ]
        return float(np.average(cut, weights=self._weights)) if sum(self._weights) else 0.0

    def shares(self, ranks: Sequence[int]) -> Mapping[int, float]:
        return {count: self.share(count) for count in ranks}

    def _owners(self, ranks: int, count: int) -> Owners:
        if self._positions is None and self._method != "range":
            return HashOwners(ranks)
        return RangeOwners(ranks, count, positions=self._positions)


def _edges(graph: Graph, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(destinations, sources) of all edges, or of some at random."""
    count = graph.num_edges
    chosen = np.arange(count) if count <= _MOST_EDGES else np.sort(rng.integers(0, count, _MOST_EDGES))
    targets = np.searchsorted(graph.indptr, chosen, "right") - 1
    return targets, np.asarray(graph.indices[chosen]).astype(np.int64)
