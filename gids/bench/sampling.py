"""Arguments that questions share: the table, cache sizes, samplers by name, and sampled minibatches.

Called by the questions and bench/.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gids import cuda
from gids.heat import choose_seeds
from gids.loader.node_loader import NodeLoader
from gids.sampler import Labor, Ladies, Minibatch, Neighbor, RandomWalk, Sampler
from gids.sizes import parse_bytes
from gids.store import FeatureStore, Table
from gids.store.part import refuse_part

SAMPLERS = ("neighbor", "labor", "labor-1", "labor-star", "ladies", "ladies-poisson", "walk")
DEPENDENT = SAMPLERS[:4]
"""The samplers that take a kappa."""


def check_known(option: str, name: str, known: tuple[str, ...], more: str = "") -> None:
    """Raise ValueError for an unknown name."""
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)} (got {name!r}){more}")


def parse_cache_size(text: str) -> tuple[str, str, float]:
    """Parse a cache size: (text, unit "%", "x" or "B", number). Raises ValueError."""
    unit = text[-1:] if text[-1:] in ("%", "x") else "B"
    try:
        number = float(parse_bytes(text)) if unit == "B" else float(text[:-1])
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        ways = "2% (of the pages), 4GB or 5x (minibatches)"
        raise ValueError(f"--cache {text} is not a cache size: use {ways}")
    return text, unit, number / 100 if unit == "%" else number


def open_table(args: argparse.Namespace) -> tuple[FeatureStore, Table]:
    """Open the dataset, and find the table of --table, by default the largest table of nodes.

    Raises ValueError for a part of a dataset, and for one without a table of nodes.
    """
    store = FeatureStore(Path(args.path), allow_dirs=args.allow_dir)
    refuse_part(store, f"gids {args.command}", "measure with the whole dataset")
    if args.table is not None:
        return store, store.table(args.table)
    node_tables = [t for t in store.tables.values() if t.kind == "node"]
    if not node_tables:
        raise ValueError(f"{store.name} has no table of nodes")
    return store, max(node_tables, key=lambda t: t.page_count * t.page_bytes)


def make_sampler(
    name: str, fanouts: Sequence[int], batch_size: int, *, threads: int | None = None, kappa: float = 1
) -> Sampler:
    """Make the sampler of this name. A layer of ladies draws batch_size x fanout nodes.

    threads: None takes torch's number. kappa: as batch_dependency; 1: independent minibatches. Raises
    ValueError for an unknown name, and for a kappa with a sampler that takes none.
    """
    check_known("--sampler", name, SAMPLERS)
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
