"""The share of edges that begin at a node of another rank, by owners. Called by `gids scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from gids.distributed.owners import hash_owners, range_owners
from gids.distributed.source import OwnedBy
from gids.store import FeatureStore, Graph
from gids.write.row_order import community_order

METHODS = (*get_args(OwnedBy), "community")
_MOST_EDGES = 2_000_000  # of each relation; of more, so many are drawn


def cut_shares(
    store: FeatureStore, graphs: Sequence[Graph], method: str, ranks: Sequence[int], seed: int = 0
) -> dict[int, float]:
    """The share of edges that is cut, 0 to 1, by number of ranks. "heat" has the owners of "hash".

    Raises ValueError for an unknown method, and for communities of a dataset with several node types.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)} (got {method!r})")
    rng = np.random.default_rng(seed)
    ends = [(g.relation, *_edges(g, rng)) for g in graphs]
    weights = [g.num_edges for g in graphs]
    positions = _communities(store, graphs) if method == "community" else None

    def owners(ntype: str, ids: np.ndarray, count: int) -> np.ndarray:
        if method in ("range", "community"):
            return range_owners(count, store.num_nodes(ntype), positions=positions)(ids)
        return hash_owners(count)(ids)

    def share(count: int) -> float:
        cut = [
            float(np.mean(owners(dst, targets, count) != owners(src, sources, count)))
            if len(sources)
            else 0.0
            for (src, _, dst), targets, sources in ends
        ]
        return float(np.average(cut, weights=weights)) if sum(weights) else 0.0

    return {count: share(count) for count in ranks}


def _communities(store: FeatureStore, graphs: Sequence[Graph]) -> np.ndarray:
    """The position of each node in the order by communities."""
    if len(store.node_types) > 1:
        raise ValueError(
            f"owners by community need one node type ({store.name} has {len(store.node_types)}): use hash or "
            "range"
        )
    degrees = np.zeros(store.num_nodes(store.node_types[0]), np.int64)
    for graph in graphs:
        degrees += np.bincount(graph.indices, minlength=len(degrees))
    return community_order([(g.indptr, g.indices) for g in graphs], degrees.astype(np.uint32))


def _edges(graph: Graph, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(destinations, sources) of all edges, or of some at random."""
    count = graph.num_edges
    chosen = np.arange(count) if count <= _MOST_EDGES else np.sort(rng.integers(0, count, _MOST_EDGES))
    targets = np.searchsorted(graph.indptr, chosen, "right") - 1
    return targets, np.asarray(graph.indices[chosen]).astype(np.int64)
