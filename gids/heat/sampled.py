"""Heat by sampling: the number of minibatches that read each node. Called by `gids heat` and bench/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gids.heat.seeds import Ids, Seeds, check_fanouts, check_seeds
from gids.sampler import Neighbor, Topology
from gids.store import FeatureStore, graphs_of
from gids.store.part import refuse_part


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
