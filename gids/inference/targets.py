"""The nodes that each layer is computed for, and their blocks. Called by layerwise. Knows no features.

A block's cost is an upper bound of the rows that it reads: its nodes and their in-edges. Blocks are cut by
cost, in the order of ids, as neighboring ids share rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gids.errors import MemoryBudgetError
from gids.sampler import Minibatch, Neighbor, Topology

_SAMPLED_ROWS = 1 << 17
"""Target rows of blocks that are sampled only for their nodes."""
Nodes = torch.Tensor | None
"""Ids in ascending order, int64[n]; or None: all nodes of the type."""


@dataclass(frozen=True)
class Span:
    """Successive targets of one type: the positions start to stop - 1 among them."""

    ntype: str
    start: int
    stop: int
    cost: int


class Targets:
    """The nodes of every type that one layer is computed for."""

    def __init__(self, topology: Topology, nodes: Mapping[str, Nodes]) -> None:
        self._topology = topology
        self._counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        self.nodes = dict(nodes)

    @property
    def count(self) -> int:
        return sum(map(self.count_of, self.nodes))

    def count_of(self, ntype: str) -> int:
        ids = self.nodes[ntype]
        return self._counts[ntype] if ids is None else len(ids)

    def ids(self, span: Span) -> torch.Tensor:
        """int64[stop - start]: the nodes of a span."""
        ids = self.nodes[span.ntype]
        return torch.arange(span.start, span.stop) if ids is None else ids[span.start : span.stop]

    def positions(self, ntype: str, ids: torch.Tensor) -> torch.Tensor:
        """The positions of nodes among the targets of their type."""
        targets = self.nodes[ntype]
        return ids if targets is None else torch.searchsorted(targets, ids)

    def spans(self, most: int, limit: int, *, edge_rows: bool = False) -> list[Span]:
        """All targets, cut into spans that cost at most `most`, or hold one node of at most `limit`.

        edge_rows: rows of edges are read too, so a span costs at least its number of in-edges. Raises
        MemoryBudgetError for a node that costs more than `limit`.
        """
        spans = []
        for ntype in self.nodes:
            cost, count, start = self._costs(ntype), self.count_of(ntype), 0
            while True:  # without nodes, one empty span gives the shapes
                end = bisect_right(range(count + 1), cost(start) + most, start + 1, count + 1, key=cost) - 1
                stop = min(count, max(start + 1, end))
                rows = cost(stop) - cost(start)
                span = Span(ntype, start, stop, rows if edge_rows else self._distinct(ntype, rows))
                if span.cost > limit:
                    raise MemoryBudgetError(
                        f"{ntype!r} node {int(self.ids(span)[0])} and its in-neighbors are up to "
                        f"{span.cost} rows, but a block has room for {limit}: give gids.open() more memory"
                    )
                spans.append(span)
                if stop == count:
                    break
                start = stop
        return spans

    def _distinct(self, ntype: str, cost: int) -> int:
        """The cost, limited to the number of nodes."""
        sources = {ntype} | {r[0] for r in self._topology.relations if r[2] == ntype}
        return min(cost, sum(self._counts[t] for t in sources))

    def _costs(self, ntype: str) -> Callable[[int], int]:
        """The cost of the first n targets of a type, as a function of n."""
        indptrs = [g.indptr for g in self._topology.graphs if g.relation[2] == ntype]
        ids = self.nodes[ntype]
        if ids is None:
            return lambda n: n + sum(int(indptr[n]) for indptr in indptrs)
        wanted = ids.numpy()
        costs = np.ones(len(wanted) + 1, np.int64)
        costs[0] = 0
        for indptr in indptrs:
            costs[1:] += indptr[wanted + 1] - indptr[wanted]
        costs.cumsum(out=costs)
        return lambda n: int(costs[n])


class Neighborhoods:
    """Samples the full in-neighborhoods of nodes of one type."""

    def __init__(self, topology: Topology, threads: int | None) -> None:
        self.topology = topology
        self._sampler = Neighbor([-1], threads=threads)

    def minibatch(self, targets: Targets, span: Span) -> Minibatch:
        ids = targets.ids(span)
        return self._sampler.sample(self.topology, ids if self.topology.homogeneous else {span.ntype: ids})

    def needed_by(self, targets: Targets) -> Targets:
        """The targets of the layer before: these targets and their in-neighbors.

        If all nodes of a type are targets, all nodes of its neighbors' types count as needed. A type of which
        no node is needed is there without nodes, as blocks have its relations. Takes one byte of memory per
        node of the types that are not whole.
        """
        topology = self.topology
        counts = dict(zip(topology.node_types, topology.node_counts, strict=True))
        whole_types: set[str] = set()
        read_types: set[str] = set()
        for ntype, ids in targets.nodes.items():
            of_type = {ntype, *(r[0] for r in topology.relations if r[2] == ntype)}
            read_types |= of_type
            if ids is None:
                whole_types |= of_type
        flags = {t: torch.zeros(counts[t], dtype=torch.bool) for t in read_types - whole_types}
        some = Targets(topology, {t: ids for t, ids in targets.nodes.items() if ids is not None})
        for span in some.spans(_SAMPLED_ROWS, sum(counts.values()) + 1):
            for ntype, ids in self.input_nodes(self.minibatch(some, span)):
                if ntype in flags:
                    flags[ntype][ids] = True
        needed: dict[str, Nodes] = {}
        for ntype in topology.node_types:
            flagged = flags.pop(ntype, torch.zeros(0)).nonzero().flatten()
            needed[ntype] = None if ntype in whole_types else flagged
        return Targets(topology, needed)

    def input_nodes(self, minibatch: Minibatch) -> list[tuple[str, torch.Tensor]]:
        """(type, ids) of the nodes that a block reads."""
        nodes = minibatch.input_nodes
        return list(nodes.items()) if isinstance(nodes, dict) else [(self.topology.node_types[0], nodes)]
