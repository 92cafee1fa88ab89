"""Heat by sampling: the number of minibatches that read each node. Called by `gids heat` and bench/."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gids.errors import FormatError
from gids.heat.seeds import Ids, Seeds, check_fanouts, check_seeds
from gids.store import FeatureStore, Graph, graphs_of
from gids.store.names import describe_type


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
    """The number of minibatches of neighbor sampling that contain each node.

    seeds: node type -> int64[n], drawn in random order, batch_size of all types together. fanouts: for every
    relation; as in DGL, the last one applies to the seeds; -1: all neighbors. batches: number of minibatches;
    None: one epoch. seed: seed of the random draws.

    Returns node type -> float32[num_nodes], for every type. Raises FormatError for a dataset without topology
    or with ids out of range, IndexError and ValueError for invalid arguments.
    """
    check_fanouts(fanouts)
    check_seeds(store, seeds)
    if batch_size < 1 or (batches is not None and batches < 1):
        raise ValueError(f"batch_size={batch_size}, batches={batches}; both must be 1 or more")
    graphs = graphs_of(store)
    rng = np.random.default_rng(seed)
    if batches is None:
        batches = -(-sum(map(len, seeds.values())) // batch_size)
    on_total(batches)
    counts = {ntype: np.zeros(store.num_nodes(ntype), np.float32) for ntype in store.node_types}
    for minibatch in itertools.islice(_minibatches(seeds, batch_size, rng), batches):
        for ntype, ids in _expand(graphs, minibatch, fanouts, rng).items():
            counts[ntype][ids] += 1  # ids are unique
        on_batch(1)
    return counts


def sample_in_edges(
    indptr: npt.NDArray[np.int64],
    indices: npt.NDArray[np.integer],
    nodes: Ids,
    fanout: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.integer]:
    """Draw `fanout` in-edges of each node, uniformly without replacement, and return their sources.

    Takes all if a node has fewer in-edges or fanout is -1. indptr, indices: in-edges (CSC). nodes: int64[n].
    Returns [m], with the type of indices, in no order.
    """
    begin = indptr[nodes]
    degree = indptr[nodes + 1] - begin
    all_of = degree <= fanout if fanout != -1 else np.ones(len(nodes), bool)
    every = np.repeat(begin[all_of], degree[all_of]) + _ranges(degree[all_of])
    begin, degree = begin[~all_of], degree[~all_of]
    # Floyd's sampling for all nodes at once: the i-th draw is from the first degree - fanout + i + 1 edges.
    # If this edge was drawn before, take the last of them.
    drawn = np.empty((len(begin), max(fanout, 0)), np.int64)
    for i in range(fanout):
        last = degree - fanout + i
        draw = (rng.random(len(begin)) * (last + 1)).astype(np.int64)
        again = (drawn[:, :i] == draw[:, None]).any(axis=1)
        drawn[:, i] = np.where(again, last, draw)
    positions = np.concatenate([every, (begin[:, None] + drawn).ravel()])
    return np.asarray(indices[positions])


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


def _expand(
    graphs: Sequence[Graph], seeds: dict[str, Ids], fanouts: Sequence[int], rng: np.random.Generator
) -> dict[str, Ids]:
    """All unique nodes of the minibatch of these seeds. Nodes found in one layer draw in the next."""
    nodes = seeds
    for fanout in reversed(fanouts):
        found = {ntype: [ids] for ntype, ids in nodes.items()}
        for graph in graphs:
            source, _, destination = graph.relation
            if destination in nodes and len(nodes[destination]):
                drawn = sample_in_edges(graph.indptr, graph.indices, nodes[destination], fanout, rng)
                found.setdefault(source, []).append(_checked(drawn, graph))
        nodes = {ntype: np.unique(np.concatenate(parts)) for ntype, parts in found.items()}
    return nodes


def _checked(sources: npt.NDArray[np.integer], graph: Graph) -> Ids:
    if len(sources) and not (sources.min() >= 0 and sources.max() < graph.num_src):
        raise FormatError(
            f"topology of {describe_type(graph.relation)} has sources from {sources.min()} to "
            f"{sources.max()} for {graph.num_src} nodes; `gids verify` lists all faults"
        )
    return sources.astype(np.int64)


def _ranges(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
