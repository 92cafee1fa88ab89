"""Samplers by name, and minibatches as gids.NodeLoader samples them, without features.

Called by the commands and by gids.scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gids import cuda
from gids.bench.arguments import DEPENDENT, check_sampler
from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler
from gids.sampler.minibatch import Block, PerType
from gids.store import FeatureStore


def make_sampler(
    name: str, fanouts: Sequence[int], batch_size: int, *, threads: int | None = None, kappa: float = 1
) -> Sampler:
    """Make the sampler of this name. A layer of ladies draws batch_size x fanout nodes.

    threads: None takes torch's number. kappa: as batch_dependency; 1: independent minibatches. Raises
    ValueError for an unknown name, and for a kappa with a sampler that takes none.
    """
    check_sampler(name)
    if kappa != 1 and name not in DEPENDENT:
        raise ValueError(f"sampler {name!r} takes no kappa (samplers that do: {', '.join(DEPENDENT)})")
    if name == "neighbor":
        return Neighbor(fanouts, batch_dependency=kappa, threads=threads)
    if name == "walk":
        return RandomWalk(fanouts, threads=threads)
    if name in ("ladies", "ladies-poisson"):
        sizes = [batch_size * fanout if fanout > 0 else fanout for fanout in fanouts]
        return Ladies(sizes, poisson=name == "ladies-poisson", threads=threads)
    importance = {"labor": 0, "labor-1": 1, "labor-star": -1}[name]
    return Labor(fanouts, importance_sampling=importance, batch_dependency=kappa, threads=threads)


class SeedOrder:
    """The seeds of choose_seeds in random order, over all types, epoch after epoch."""

    def __init__(self, seeds: Mapping[str, npt.NDArray[np.int64]], *, homogeneous: bool, seed: int) -> None:
        self._homogeneous, self._names = homogeneous, list(seeds)
        types = np.repeat(np.arange(len(seeds)), [len(ids) for ids in seeds.values()])
        order = np.random.default_rng(seed).permutation(len(types))
        self._ids, self._types = np.concatenate(list(seeds.values()))[order], types[order]

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, first: int, count: int) -> PerType:
        """`count` seeds from a position of the endless order on; all seeds, if there are fewer."""
        chosen = np.arange(first, first + min(count, len(self))) % len(self)
        ids, types = self._ids[chosen], self._types[chosen]
        if self._homogeneous:
            return torch.from_numpy(ids)
        return {name: torch.from_numpy(ids[types == i]) for i, name in enumerate(self._names)}


def endless(
    store: FeatureStore, sampler: Sampler, *, seeds: str, batch_size: int, seed: int
) -> Iterator[Minibatch]:
    """Yield the minibatches of a NodeLoader with these arguments, epoch after epoch.

    Raises FormatError for a dataset without topology, ValueError, IndexError.
    """
    ids = choose_seeds(store, seeds)
    homogeneous = len(store.node_types) == 1 and len(store.relations) == 1
    loader = NodeLoader(
        store,
        torch.from_numpy(*ids.values()) if homogeneous else {t: torch.from_numpy(ids[t]) for t in ids},
        sampler,
        tables=[],
        batch_size=batch_size,
        shuffle=True,
        seed=seed,
        labels=False,
    )
    while True:
        yield from loader


def input_nodes(minibatch: Minibatch, ntype: str) -> torch.Tensor:
    """The nodes of a type whose features the minibatch reads: int64[n] on the CPU, distinct."""
    nodes = minibatch.input_nodes
    if isinstance(nodes, dict):
        nodes = nodes.get(ntype, torch.empty(0, dtype=torch.int64))
    return cuda.on_host(nodes)


def counts(minibatch: Minibatch) -> tuple[int, int]:
    """(input nodes, edges) of all types and layers."""
    nodes = minibatch.input_nodes
    node_count = sum(map(len, nodes.values())) if isinstance(nodes, dict) else len(nodes)
    return node_count, sum(block.num_edges for block in blocks_of(minibatch))


def blocks_of(minibatch: Minibatch) -> list[Block]:
    """The blocks of all layers and relations."""
    return [b for layer in minibatch.blocks for b in (layer.values() if isinstance(layer, dict) else [layer])]
