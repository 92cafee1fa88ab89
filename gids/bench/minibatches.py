"""Minibatches as training would sample them: gids.NodeLoader's, without features, epoch after epoch.

Called by the questions. A sampler that gids learns gets a line in SAMPLERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.sampler import Minibatch, Neighbor, Sampler
from gids.sampler.minibatch import PerType
from gids.store import FeatureStore

SAMPLERS: Mapping[str, Callable[[Sequence[int], int | None], Sampler]] = {
    "neighbor": lambda fanouts, threads: Neighbor(fanouts, threads=threads),
}
"""By name, what makes a sampler of fanouts and a number of threads (None: torch's)."""


def make_sampler(name: str, fanouts: Sequence[int], threads: int | None = None) -> Sampler:
    """The sampler of that name. Raises ValueError, with the names that there are."""
    if name not in SAMPLERS:
        raise ValueError(f"no sampler {name!r} (there are {', '.join(SAMPLERS)})")
    return SAMPLERS[name](fanouts, threads)


def seeds_of(store: FeatureStore, which: str) -> PerType:
    """The seeds of a split, or "all", as NodeLoader takes them. Raises ValueError for an empty split."""
    seeds = {ntype: torch.from_numpy(ids) for ntype, ids in choose_seeds(store, which).items()}
    if len(store.node_types) == 1 and len(store.relations) == 1:
        return next(iter(seeds.values()))
    return seeds


def endless(
    store: FeatureStore, sampler: Sampler, *, seeds: str, batch_size: int, seed: int
) -> Iterator[Minibatch]:
    """Minibatches without end; those that a NodeLoader of the same arguments trains on.

    Raises FormatError for a dataset without topology, ValueError, IndexError.
    """
    loader = NodeLoader(
        store, seeds_of(store, seeds), sampler, tables=[], batch_size=batch_size, seed=seed, labels=False
    )
    while True:
        yield from loader


def input_nodes(minibatch: Minibatch, ntype: str) -> torch.Tensor:
    """The nodes of a type whose features the minibatch reads: int64[n] on the CPU, each once."""
    nodes = minibatch.input_nodes
    if isinstance(nodes, dict):
        nodes = nodes.get(ntype, torch.empty(0, dtype=torch.int64))
    return nodes.cpu()


def counts(minibatch: Minibatch) -> tuple[int, int]:
    """(input nodes, edges) of all types and layers."""
    nodes = minibatch.input_nodes
    node_count = sum(map(len, nodes.values())) if isinstance(nodes, dict) else len(nodes)
    blocks = (
        b for layer in minibatch.blocks for b in (layer.values() if isinstance(layer, dict) else [layer])
    )
    return node_count, sum(block.num_edges for block in blocks)
