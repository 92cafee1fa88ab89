"""Heat without sampling: expected visits, propagated from seeds along in-edges. Called by `gids heat`.

Each pass streams over the mapped in-edges. Memory: four numbers per node and a block of destinations. Knows
no pages or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from gids import _core
from gids.errors import FormatError
from gids.heat.sampled import Seeds, check_fanouts, check_seeds
from gids.store import FeatureStore, Graph, graphs_of
from gids.store.names import describe_type
from gids.store.part import refuse_part

Visits = npt.NDArray[np.float64]

_BLOCK_NODES = 1 << 18
_CURE = "compute the heat of the whole dataset, then partition it"


def reverse_pagerank(
    store: FeatureStore,
    seeds: Seeds,
    *,
    damping: float = 0.85,
    tolerance: float = 0.01,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Visits]:
    """Expected visits of random walks against the edges, one from each seed (Data Tiering, Min et al., 2022).

    seeds: node type -> int64[n]. With probability `damping` a walk continues: it chooses one of the relations
    in which its node has in-edges, then the source of one of these in-edges, all with equal probability. A
    walk ends at a node without in-edges. Stops when at most the fraction `tolerance` of visits is missing.

    Returns node type -> float64[num_nodes], for every type. on_bytes(n): progress, in bytes of in-edges.
    Raises FormatError for a dataset without topology, IndexError and ValueError for invalid arguments.
    """
    if not 0 < damping < 1 or not 0 < tolerance < 1:
        raise ValueError(f"damping={damping}, tolerance={tolerance}; both must be between 0 and 1")
    graphs = graphs_of(store)
    continuing = _continuing(store, graphs, damping)
    moving = _seeded(store, seeds)
    visits = {ntype: values.copy() for ntype, values in moving.items()}
    while True:
        for ntype, values in moving.items():
            values *= continuing[ntype]
        moving = _carry(store, graphs, moving, 1, on_bytes)
        for ntype, values in moving.items():
            visits[ntype] += values
        missing = _total(moving) * damping / (1 - damping)  # the number of walks only decreases
        if missing <= tolerance * _total(visits):
            return visits


def expected_visits(
    store: FeatureStore,
    seeds: Seeds,
    fanouts: Sequence[int],
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, Visits]:
    """How often neighbor sampling is expected to read each node in one epoch of the seeds.

    fanouts: as in DGL, the last one applies to the seeds; -1: all neighbors. In each layer every node found
    so far draws min(fanout, in-degree) of its in-edges per relation, and remains. A node that several nodes
    of a minibatch draw counts several times, which makes the computation linear.

    Returns and raises as `reverse_pagerank`.
    """
    check_fanouts(fanouts)
    graphs = graphs_of(store)
    visits = _seeded(store, seeds)
    for fanout in reversed(fanouts):
        for ntype, values in _carry(store, graphs, visits, fanout, on_bytes).items():
            visits[ntype] += values
    return visits


def _seeded(store: FeatureStore, seeds: Seeds) -> dict[str, Visits]:
    check_seeds(store, seeds)
    refuse_part(store, "gids.heat", _CURE)
    visits = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for ntype, ids in seeds.items():
        np.add.at(visits[ntype], ids, 1.0)
    return visits


def _continuing(store: FeatureStore, graphs: Sequence[Graph], damping: float) -> dict[str, Visits]:
    """The probability that a walk continues from a node along each relation in which it has in-edges."""
    relations = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for graph in graphs:
        relations[graph.relation[2]] += graph.indptr[1:] > graph.indptr[:-1]
    return {ntype: damping / np.maximum(count, 1) for ntype, count in relations.items()}


def _carry(
    store: FeatureStore,
    graphs: Sequence[Graph],
    visits: dict[str, Visits],
    fanout: int,
    on_bytes: Callable[[int], None],
) -> dict[str, Visits]:
    """The visits that one layer of sampling adds to the sources of nodes with these visits."""
    reached = {ntype: np.zeros(store.num_nodes(ntype)) for ntype in store.node_types}
    for graph in graphs:
        source, _, destination = graph.relation
        topology = f"topology of {describe_type(graph.relation)}"
        for first in range(0, graph.num_dst, _BLOCK_NODES):
            indptr = np.asarray(graph.indptr[first : first + _BLOCK_NODES + 1])
            # Each in-edge is drawn with probability min(fanout, degree) / degree.
            shares = visits[destination][first : first + _BLOCK_NODES].copy()
            if fanout != -1:
                shares *= np.minimum(fanout / np.maximum(np.diff(indptr), 1), 1.0)
            try:
                bad = _core.carry_to_sources(indptr, graph.indices, shares, reached[source])
            except ValueError as error:
                raise FormatError(f"{topology}: {error}; `gids verify` lists all faults") from None
            if bad is not None:
                must = f"it must be from 0 to {graph.num_src - 1}"
                raise FormatError(f"{topology}: indices[{bad}] is {graph.indices[bad]}; {must}")
            on_bytes(int(indptr[-1] - indptr[0]) * graph.indices.itemsize)
    return reached


def _total(visits: dict[str, Visits]) -> float:
    return float(sum(values.sum() for values in visits.values()))
