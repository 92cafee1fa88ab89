"""Seeds from the splits of a dataset, and checks of seeds and fanouts. Called by the methods of heat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gids.store import FeatureStore
from gids.store.names import SPLITS

Ids = npt.NDArray[np.int64]
Seeds = Mapping[str, Ids]


def choose_seeds(store: FeatureStore, which: str) -> dict[str, Ids]:
    """The ids of a split ("train", "val" or "test") or of "all" nodes: node type -> int64[n].

    Raises ValueError if no node type has this split.
    """
    if which == "all":
        return {ntype: np.arange(store.num_nodes(ntype)) for ntype in store.node_types}
    if which not in SPLITS:
        raise ValueError(f"seeds={which!r}; it must be one of {', '.join(SPLITS)}, all")
    seeds = {ntype: split[which].numpy() for ntype, split in store.splits.items() if which in split}
    if not any(map(len, seeds.values())):
        raise ValueError(f"{store.name} has no {which} split: give seeds='all' (--seeds all)")
    return seeds


def check_seeds(store: FeatureStore, seeds: Seeds) -> None:
    """Raise IndexError if a seed is out of range, ValueError if there are no seeds."""
    for ntype, ids in seeds.items():
        count = store.num_nodes(ntype)
        if len(ids) and not (ids.min() >= 0 and ids.max() < count):
            raise IndexError(
                f"seeds of {ntype!r} run from {ids.min()} to {ids.max()}; there are {count} nodes"
            )
    if not any(map(len, seeds.values())):
        raise ValueError("there are no seeds; give at least one")


def check_fanouts(fanouts: Sequence[int]) -> None:
    """Raise ValueError unless every fanout is 1 or more, or -1 for all neighbors."""
    if not fanouts or any(f < 1 and f != -1 for f in fanouts):
        raise ValueError(f"fanouts={list(fanouts)}; give one per layer: 1 or more, or -1 for all neighbors")
