"""Minibatches as gids.NodeLoader samples them, without features. Called by the commands.

A new sampler of gids gets a line in SAMPLERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler
from gids.sampler.minibatch import Block, PerType
from gids.store import FeatureStore


@dataclass(frozen=True)
class SamplerOptions:
    """Arguments of a sampler. kappa: of dependent minibatches; 1: independent."""

    fanouts: Sequence[int]
    batch_size: int
    threads: int | None = None
    kappa: float = 1


def _labor(importance_sampling: int) -> Callable[[SamplerOptions], Sampler]:
    return lambda given: Labor(
        given.fanouts,
        importance_sampling=importance_sampling,
        batch_dependency=given.kappa,
        threads=given.threads,
    )


def _ladies(poisson: bool) -> Callable[[SamplerOptions], Sampler]:
    def make(given: SamplerOptions) -> Sampler:
        sizes = [given.batch_size * fanout if fanout > 0 else fanout for fanout in given.fanouts]
        return Ladies(sizes, poisson=poisson, threads=given.threads)

    return make


SAMPLERS: Mapping[str, Callable[[SamplerOptions], Sampler]] = {
    "neighbor": lambda given: Neighbor(given.fanouts, batch_dependency=given.kappa, threads=given.threads),
    "labor": _labor(0),
    "labor-1": _labor(1),
    "labor-star": _labor(-1),
    "ladies": _ladies(False),
    "ladies-poisson": _ladies(True),
    "walk": lambda given: RandomWalk(given.fanouts, threads=given.threads),
}
"""Name -> factory. A layer of ladies draws batch_size x fanout nodes."""

DEPENDENT = ("neighbor", "labor", "labor-1", "labor-star")
"""The samplers that take a kappa."""


def make_sampler(
    name: str, fanouts: Sequence[int], batch_size: int, *, threads: int | None = None, kappa: float = 1
) -> Sampler:
    """Make the sampler of this name. threads: None takes torch's number.

    Raises ValueError for an unknown name, and for a kappa with a sampler that takes none.
    """
    check_sampler(name)
    if kappa != 1 and name not in DEPENDENT:
        raise ValueError(f"sampler {name!r} takes no kappa (samplers that do: {', '.join(DEPENDENT)})")
    return SAMPLERS[name](SamplerOptions(fanouts, batch_size, threads, kappa))


def check_sampler(name: str) -> None:
    """Raise ValueError for an unknown name."""
    if name not in SAMPLERS:
        raise ValueError(f"no sampler {name!r} (there are {', '.join(SAMPLERS)})")


def seeds_of(store: FeatureStore, which: str) -> PerType:
    """The seeds of a split, or of "all", as NodeLoader takes them. Raises ValueError for an empty split."""
    seeds = {ntype: torch.from_numpy(ids) for ntype, ids in choose_seeds(store, which).items()}
    if len(store.node_types) == 1 and len(store.relations) == 1:
        return next(iter(seeds.values()))
    return seeds


def endless(
    store: FeatureStore, sampler: Sampler, *, seeds: str, batch_size: int, seed: int
) -> Iterator[Minibatch]:
    """Yield the minibatches of a NodeLoader with these arguments, epoch after epoch.

    Raises FormatError for a dataset without topology, ValueError, IndexError.
    """
    loader = NodeLoader(
        store,
        seeds_of(store, seeds),
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
    return nodes.cpu()


def counts(minibatch: Minibatch) -> tuple[int, int]:
    """(input nodes, edges) of all types and layers."""
    nodes = minibatch.input_nodes
    node_count = sum(map(len, nodes.values())) if isinstance(nodes, dict) else len(nodes)
    return node_count, sum(block.num_edges for block in blocks_of(minibatch))


def blocks_of(minibatch: Minibatch) -> list[Block]:
    """The blocks of all layers and relations."""
    return [b for layer in minibatch.blocks for b in (layer.values() if isinstance(layer, dict) else [layer])]
