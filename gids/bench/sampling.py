"""Samplers by name, and minibatches as gids.NodeLoader samples them. Called by the questions and bench/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gids import cuda
from gids.bench.arguments import DEPENDENT, check_sampler
from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler
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
