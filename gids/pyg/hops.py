"""Sampling like PyG: in each hop, only the nodes that the previous hop found draw neighbours.

gids.sampler.Neighbor samples like DGL: in each layer, all nodes found so far draw. HopSampler makes a hop
of one such layer. In its topology, relations lead to copies of their destination types. The seeds of a copy
are the newest nodes. The seeds of the real types are all nodes found so far: they draw nothing, and are seeds
so that they are numbered first. Knows nothing of PyG.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gids.pyg.edge_weights import Weights
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.sampler.layered import array_digest
from gids.sampler.minibatch import PerType
from gids.sampler.topology import AnyGraph, Graphs
from gids.store import Graph
from gids.store.names import Relation

Counts = list[int] | Mapping[Relation, list[int]]


@dataclass
class HopEdges:
    """A relation's sampled edges, hop after hop.

    index: int64[2, num_edges], local ids of sources and of destinations; destinations are in ascending order.
    ids: int64[num_edges], edge ids, which number the rows of edge features. per_hop: number of edges of each
    hop.
    """

    index: torch.Tensor
    ids: torch.Tensor
    per_hop: list[int]


@dataclass
class HopMinibatch(Minibatch):
    """A minibatch of HopSampler. It has the edges of hops instead of blocks.

    nodes_per_hop: by node type, the number of seeds, then the number of new nodes of each hop.
    """

    edges: dict[Relation, HopEdges] = field(default_factory=dict)
    nodes_per_hop: dict[str, list[int]] = field(default_factory=dict)

    def edge_ids_of(self, relation: Relation) -> torch.Tensor:
        return self.edges[relation].ids

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        for edges in self.edges.values():
            yield from (edges.index, edges.ids)


class HopSampler:
    """Each node draws neighbours once, in the hop after it was found.

    num_neighbors: for each hop, the seeds' hop first (PyG's order), the number of neighbours that a node
    draws: 1 or more, -1 for all, 0 for none; or such a list for each relation. replace, weights: as in
    gids.sampler.Neighbor, weights by relation; sampled edges have no weights. threads: on the CPU (None:
    torch's number).

    Minibatches are HopMinibatches. Like Neighbor's, they depend only on the arguments of sample(), not on
    threads or the device. Memory: as Neighbor.
    """

    def __init__(
        self,
        num_neighbors: Counts,
        *,
        replace: bool = False,
        weights: Weights | None = None,
        threads: int | None = None,
    ) -> None:
        per_relation = list(num_neighbors.values()) if isinstance(num_neighbors, Mapping) else [num_neighbors]
        lengths = {len(hops) for hops in per_relation if isinstance(hops, Sequence)}
        numbers = [n for hops in per_relation if isinstance(hops, Sequence) for n in hops]
        if (
            len(lengths) != 1
            or lengths == {0}
            or not all(isinstance(hops, list | tuple) for hops in per_relation)
            or not all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in numbers)
        ):
            raise ValueError(
                f"num_neighbors={num_neighbors}; give a number for each hop (1 or more, -1 for all "
                "neighbours, 0 for none), or such a list for each relation"
            )
        self.num_neighbors = num_neighbors
        self.hops = lengths.pop()
        self.replace, self.weights = bool(replace), weights
        self.threads = threads
        self._neighbor: tuple[list[Relation], Neighbor] | None = None
        self._expansion: tuple[Topology, _Expansion] | None = None
        self._digests: dict[Relation, str] | None = None

    def sample(
        self, graphs: Graphs | Topology, seeds: PerType, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """Sample one minibatch. Arguments, device and errors are as in gids.sampler.Neighbor.sample."""
        topology = Topology.of(graphs)
        expansion = self._expansion_of(topology)
        neighbor = self._neighbor_of(expansion)
        nodes = dict(zip(topology.node_types, topology.seeds_by_type(seeds), strict=True))
        counts = {t: [len(ids)] for t, ids in nodes.items()}
        begins = dict.fromkeys(nodes, 0)  # of the newest nodes
        parts: list[list[tuple[Block, int]]] = [[] for _ in topology.graphs]
        for hop in range(self.hops):
            frontier = {t: nodes[t][begin:] for t, begin in begins.items()}
            found = neighbor.sample_layer(
                expansion.topology, expansion.seeds(nodes, frontier), hop, seed=seed, epoch=epoch, step=step
            )
            assert isinstance(found.input_nodes, dict)
            (layer,) = found.blocks
            assert isinstance(layer, dict)
            for graph, relation, part in zip(topology.graphs, expansion.relations, parts, strict=True):
                part.append((layer[relation], begins[graph.relation[2]]))
            for t in nodes:
                begins[t] = len(nodes[t])
                nodes[t] = found.input_nodes.get(t, nodes[t])
                counts[t].append(len(nodes[t]) - begins[t])
        edges = {g.relation: _joined(part) for g, part in zip(topology.graphs, parts, strict=True)}
        device = parts[0][0][0].indices.device
        nodes = {t: ids.to(device) for t, ids in nodes.items()}  # unchanged if nothing was found
        drawn_for = {
            t: ids[: counts[t][0]] for t, ids in nodes.items() if counts[t][0] or topology.homogeneous
        }
        if topology.homogeneous:
            (input_nodes,), (given,) = nodes.values(), drawn_for.values()
            return HopMinibatch(given, input_nodes, [], epoch, step, edges=edges, nodes_per_hop=counts)
        return HopMinibatch(drawn_for, nodes, [], epoch, step, edges=edges, nodes_per_hop=counts)

    @property
    def nbytes(self) -> int:
        """Memory kept between minibatches, on the host and on devices."""
        return 0 if self._neighbor is None else self._neighbor[1].nbytes

    def __getstate__(self) -> dict[str, Any]:
        return {
            "num_neighbors": self.num_neighbors,
            "replace": self.replace,
            "weights": self.weights,
            "threads": self.threads,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # what workers and checkpoints carry are the arguments

    def __repr__(self) -> str:
        """Everything that minibatches depend on."""
        told = ", replace=True" if self.replace else ""
        if self.weights is not None:
            if self._digests is None:  # of all edges
                self._digests = {r: array_digest(w) for r, w in self.weights.items()}
            told += f", weights={self._digests}"
        return f"HopSampler({self.num_neighbors}{told})"

    def _expansion_of(self, topology: Topology) -> _Expansion:
        made = self._expansion
        if made is None or made[0] is not topology:
            self._expansion = made = (topology, _Expansion(topology))
        return made[1]

    def _neighbor_of(self, expansion: _Expansion) -> Neighbor:
        """One sampler with a layer for each hop; the last layer is the seeds' hop."""
        made = self._neighbor
        if made is not None and made[0] == expansion.relations:
            return made[1]
        counts, named = self.num_neighbors, expansion.named
        if not isinstance(counts, Mapping):
            counts = dict.fromkeys(named, counts)
        elif counts.keys() != named.keys():
            raise ValueError(
                f"num_neighbors has {sorted(counts)}, but the graph has {sorted(named)}: give "
                "a list for each relation (zeros leave it out)"
            )
        neighbor = Neighbor(
            [{named[r]: hops[hop] for r, hops in counts.items()} for hop in reversed(range(self.hops))],
            replace=self.replace,
            weights=None if self.weights is None else {named[r]: w for r, w in self.weights.items()},
            threads=self.threads,
        )
        self._neighbor = (expansion.relations, neighbor)
        return neighbor


def _joined(hops: list[tuple[Block, int]]) -> HopEdges:
    """Join the hops' blocks, each with the position of its first destination among the nodes.

    Uses NumPy on the CPU: torch would start threads, which takes longer than the work if cores are busy.
    """
    per_hop = [block.num_edges for block, _ in hops]
    blocks = [block for block, _ in hops]
    if blocks[0].indices.device.type == "cpu":
        index = np.empty((2, sum(per_hop)), np.int64)
        np.concatenate([block.indices.numpy() for block in blocks], out=index[0])
        ends = [np.repeat(np.arange(a, a + b.num_dst), np.diff(b.indptr.numpy())) for b, a in hops]
        np.concatenate(ends, out=index[1])
        ids = np.concatenate([block.edge_ids.numpy() for block in blocks])
        return HopEdges(torch.from_numpy(index), torch.from_numpy(ids), per_hop)
    pairs = [torch.stack([src, dst + begin]) for (src, dst), begin in ((b.coo(), a) for b, a in hops)]
    return HopEdges(torch.cat(pairs, 1), torch.cat([block.edge_ids for block in blocks]), per_hop)


class _Expansion:
    """A topology whose relations lead to a copy of their destination type."""

    def __init__(self, topology: Topology) -> None:
        self._newest: dict[str, str] = {}
        for ntype in topology.node_types:
            name = f"newest {ntype}"
            while name in topology.node_types or name in self._newest.values():
                name += "'"
            self._newest[ntype] = name
        self.topology = Topology([self._to_newest(g) for g in topology.pinned or topology.graphs])
        self.relations = self.topology.relations
        self.named = dict(zip(topology.relations, self.relations, strict=True))

    def seeds(self, nodes: dict[str, torch.Tensor], newest: dict[str, torch.Tensor]) -> PerType:
        types = self.topology.node_types
        every = {**nodes, **{self._newest[t]: ids for t, ids in newest.items()}}
        return {t: ids for t, ids in every.items() if t in types}

    def _to_newest(self, given: AnyGraph) -> AnyGraph:
        graph = given if isinstance(given, Graph) else given.graph
        src, name, dst = graph.relation
        changed = replace(graph, relation=(src, name, self._newest[dst]))
        if isinstance(given, Graph):
            return changed
        other = copy.copy(given)  # the same memory, which lives while the topology does
        other.graph = changed
        return other
