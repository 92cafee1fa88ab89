"""Seeds, and heat by sampling: how many minibatches read each node. Called by `gids heat` and bench/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gids.sampler import Neighbor, Topology
from gids.store import FeatureStore, graphs_of
from gids.store.names import SPLITS
from gids.store.part import refuse_part

Ids = npt.NDArray[np.int64]
Seeds = Mapping[str, Ids]


def sampled_counts(
    store: FeatureStore,
    seeds: Seeds,
    fanouts: Sequence[int],
    *,
    batch_size: int = 1024,
    batches: int | None = None,
    seed: int = 0,
    on_total: Callable[[int], None] = lambda _: None,
    on_batch: Callable[[int], None] = lambda _: None,
) -> dict[str, npt.NDArray[np.float32]]:
    """The number of minibatches of gids.sampler.Neighbor that contain each node.

    seeds: node type -> int64[n], drawn in random order, batch_size of all types together. fanouts: for every
    relation; as in DGL, the last one applies to the seeds; -1: all neighbors. batches: number of minibatches;
    None: one epoch. seed: seed of the random draws.

    Returns node type -> float32[num_nodes], for every type. Raises FormatError for a dataset without topology
    or with ids out of range, IndexError and ValueError for invalid arguments.
    """
    check_fanouts(fanouts)
    check_seeds(store, seeds)
    refuse_part(store, "gids.heat", "compute the heat of the whole dataset, then partition it")
    if batch_size < 1 or (batches is not None and batches < 1):
        raise ValueError(f"batch_size={batch_size}, batches={batches}; both must be 1 or more")
    topology, sampler = Topology(graphs_of(store)), Neighbor(fanouts)
    if batches is None:
        batches = -(-sum(map(len, seeds.values())) // batch_size)
    on_total(batches)
    counts = {ntype: np.zeros(store.num_nodes(ntype), np.float32) for ntype in store.node_types}
    minibatches = _minibatches(seeds, batch_size, np.random.default_rng(seed))
    for step, ids in enumerate(itertools.islice(minibatches, batches)):
        known = {ntype: torch.from_numpy(ids[ntype]) for ntype in ids if ntype in topology.node_types}
        drawn = sampler.sample(topology, known, seed=seed, step=step).input_nodes
        assert isinstance(drawn, dict)
        for ntype, nodes in (ids | {t: n.numpy() for t, n in drawn.items()}).items():
            counts[ntype][nodes] += 1  # nodes are unique
        on_batch(1)
    return counts


def _minibatches(seeds: Seeds, batch_size: int, rng: np.random.Generator) -> Iterator[dict[str, Ids]]:
    """Yield minibatches of seeds, epoch after epoch, in random order over all types."""
    ends = np.cumsum([0, *map(len, seeds.values())])
    while True:
        order = rng.permutation(ends[-1])
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            yield {
                ntype: np.unique(ids[chosen[(begin <= chosen) & (chosen < end)] - begin])
                for (ntype, ids), begin, end in zip(seeds.items(), ends, ends[1:], strict=False)
            }


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
        raise ValueError(f"no node of {store.name} is in a {which} split: give seeds='all' (--seeds all)")
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
