"""The topologies that heat spreads over, and how it samples them. Called by the methods of heat."""

from __future__ import annotations

from collections.abc import Sequence

from gids.errors import FormatError
from gids.store import FeatureStore, Graph


def graphs_of(store: FeatureStore) -> list[Graph]:
    """Every relation that has a topology. Raises FormatError when none has."""
    graphs = []
    for relation in store.relations:
        try:
            graphs.append(store.graph(relation))
        except KeyError:  # a relation of edge features alone
            continue
    if not graphs:
        raise FormatError(f"{store.name} has no topology: convert the edges, too")
    return graphs


def check_fanouts(fanouts: Sequence[int]) -> None:
    """Raise ValueError unless every fanout is 1 or more, or -1 for all neighbours."""
    if not fanouts or any(f < 1 and f != -1 for f in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}; give one per layer: 1 or more, or -1 for all neighbours")
