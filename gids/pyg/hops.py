"""Sampling like PyG: in each hop, only the nodes that the previous hop found draw neighbors.

gids.sampler.Neighbor samples like DGL: in each layer, all nodes found so far draw. HopSampler makes a hop
of one such layer. In its topology, relations lead to copies of their destination types. The seeds of a copy
are the newest nodes. The seeds of the real types are all nodes found so far: they draw nothing, and are seeds
so that they are numbered first. Knows nothing of PyG.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from gids.pyg.sampling_attributes import Weights
from gids.sampler import Block, Minibatch, Neighbor, Topology
from gids.sampler.forest import AnySeeds, PlantedNodes, TimedSeeds, Trees
from gids.sampler.layered import array_digest
from gids.sampler.minibatch import PerType
from gids.sampler.neighbor import Strategy
from gids.sampler.time_order import By
from gids.sampler.topology import AnyGraph, Graphs
from gids.store import Graph
from gids.store.names import Relation

Counts = list[int] | Mapping[Relation, list[int]]


@dataclass
class HopEdges:
    """A relation's sampled edges, hop after hop.

    index: int64[2, num_edges], local ids of sources and of destinations; destinations are in ascending order.
    ids: int64[num_edges], edge ids, which number the rows of edge features; None if edges have none. per_hop:
    number of edges of each hop; None if unknown.
    """

    index: torch.Tensor
    ids: torch.Tensor | None
    per_hop: list[int] | None


@dataclass
class HopMinibatch(Minibatch):
    """A minibatch of HopSampler. It has the edges of hops instead of blocks.

    nodes_per_hop: by node type, the number of seeds, then the number of new nodes of each hop; None if
    unknown. metadata: what the loader knows of the seeds, such as their positions, on the CPU.
    """

    edges: dict[Relation, HopEdges] = field(default_factory=dict)
    nodes_per_hop: dict[str, list[int]] | None = field(default_factory=dict)
    metadata: tuple[Any, ...] = ()

    def by_type(self, values: Any) -> dict[str, Any]:
        """Values of nodes, such as input_nodes, by type; empty if there are none."""
        if values is None or isinstance(values, dict):
            return values or {}
        return {next(iter(self.edges))[0]: values}

    def edge_ids_of(self, relation: Relation) -> torch.Tensor:
        ids = self.edges[relation].ids
        return torch.empty(0, dtype=torch.int64) if ids is None else ids

    def destinations_of(self, relation: Relation) -> torch.Tensor:
        """Local ids of the nodes that drew the edges of edge_ids_of()."""
        return self.edges[relation].index[1]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        for edges in self.edges.values():
            yield edges.index
            if edges.ids is not None:
                yield edges.ids

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(v.nbytes for v in self.metadata if isinstance(v, torch.Tensor))


class HopSampler:
    """Each node draws neighbors once, in the hop after it was found.

    num_neighbors: for each hop, the seeds' hop first (PyG's order), the number of neighbors that a node
    draws: 1 or more, -1 for all, 0 for none; or such a list for each relation. Without hops a minibatch has
    the seeds alone. replace, weights: as in gids.sampler.Neighbor, weights by relation; sampled edges have no
    weights. disjoint, temporal, strategy: as in gids.sampler.Neighbor; minibatches then have `batch`.
    induced: yield all edges among the nodes that were found. threads: on the CPU (None: torch's number).

    Minibatches are HopMinibatches. Like Neighbor's, they depend only on the arguments of sample(), not on
    threads or the device. Memory: as Neighbor.

    Attributes: by_layers: whether all edges are drawn by LayeredSampler.sample_layer().
    """

    def __init__(
        self,
        num_neighbors: Counts,
        *,
        replace: bool = False,
        weights: Weights | None = None,
        disjoint: bool = False,
        temporal: By | None = None,
        strategy: Strategy = "uniform",
        induced: bool = False,
        threads: int | None = None,
    ) -> None:
        per_relation = list(num_neighbors.values()) if isinstance(num_neighbors, Mapping) else [num_neighbors]
        are_lists = all(isinstance(hops, list | tuple) for hops in per_relation)
        lengths = {len(hops) for hops in per_relation} if are_lists else set()
        if len(lengths) != 1 or not all(map(_is_count, chain.from_iterable(per_relation))):
            raise ValueError(
                f"num_neighbors={num_neighbors}; give a number for each hop (1 or more, -1 for all "
                "neighbors, 0 for none), or such a list for each relation"
            )
        self.num_neighbors = num_neighbors
        self.hops = lengths.pop()
        self.by_layers = not induced
        self.weights, self.temporal, self.induced = weights, temporal, induced
        self._drawing: dict[str, Any] = {
            "disjoint": disjoint or temporal is not None,
            "temporal": temporal,
            "strategy": strategy,
            "threads": threads,
        }
        self.disjoint: bool = self._drawing["disjoint"]
        self.replace = bool(replace)
        self._planter = Neighbor([-1], **self._drawing)  # plants trees and finds induced edges; draws nothing
        self._neighbor: tuple[list[Relation], Neighbor] | None = None
        self._expansion: tuple[Topology, _Expansion] | None = None
        self._digests: dict[Relation, str] | None = None

    def sample(
        self, graphs: Graphs | Topology, seeds: AnySeeds, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """Sample one minibatch. Arguments, device and errors are as in gids.sampler.Neighbor.sample."""
        topology = Topology.of(graphs)
        expansion = self._expansion_of(topology)
        neighbor = self._neighbor_of(expansion) if self.hops else None
        trees = self._planter.trees(topology, seeds) if self.disjoint else None
        if trees is None and isinstance(seeds, TimedSeeds):
            raise ValueError("the seeds have times, but the sampler does not sample by time")
        roots: Any = seeds if trees is None else trees.ids
        nodes = dict(zip(topology.node_types, topology.seeds_by_type(roots), strict=True))
        batch: dict[str, torch.Tensor] = {}
        if trees is not None:
            by_type = trees.batch if isinstance(trees.batch, dict) else {topology.node_types[0]: trees.batch}
            none = torch.empty(0, dtype=torch.int64)
            batch = {t: by_type.get(t, none) for t in topology.node_types}
        counts = {t: [len(ids)] for t, ids in nodes.items()}
        begins = dict.fromkeys(nodes, 0)  # of the newest nodes
        parts: list[list[tuple[Block, int]]] = [[] for _ in topology.graphs]
        for hop in range(self.hops):
            assert neighbor is not None
            ids = expansion.seeds(nodes, begins)
            drawing: AnySeeds = ids
            if trees is not None:
                drawing = PlantedNodes(ids, expansion.seeds(batch, begins), trees)
            drawn = neighbor.sample_layer(expansion.topology, drawing, hop, seed=seed, epoch=epoch, step=step)
            assert isinstance(drawn.input_nodes, dict)
            (layer,) = drawn.blocks
            assert isinstance(layer, dict)
            for graph, relation, part in zip(topology.graphs, expansion.relations, parts, strict=True):
                part.append((layer[relation], begins[graph.relation[2]]))
            for t in nodes:
                begins[t] = len(nodes[t])
                nodes[t] = drawn.input_nodes.get(t, nodes[t])
                if isinstance(drawn.batch, dict):
                    batch[t] = drawn.batch.get(t, batch[t])
                counts[t].append(len(nodes[t]) - begins[t])
        device = torch.device("cpu") if topology.device is None else topology.device.torch_device
        nodes_per_hop: dict[str, list[int]] | None = counts
        if self.induced:
            edges, nodes_per_hop = self._induced(topology, nodes, batch, trees), None
        else:
            edges = {
                g.relation: _joined(part, device) for g, part in zip(topology.graphs, parts, strict=True)
            }
        nodes = {t: ids.to(device) for t, ids in nodes.items()}  # unchanged if nothing was found
        batch = {t: numbers.to(device) for t, numbers in batch.items()}
        seeded = {t: ids[: counts[t][0]] for t, ids in nodes.items() if counts[t][0] or topology.homogeneous}
        return HopMinibatch(
            _per_type(topology, seeded),
            _per_type(topology, nodes),
            [],
            epoch,
            step,
            batch=None if trees is None else _per_type(topology, batch),
            edges=edges,
            nodes_per_hop=nodes_per_hop,
        )

    @property
    def nbytes(self) -> int:
        """Memory kept between minibatches, on the host and on devices."""
        return 0 if self._neighbor is None else self._neighbor[1].nbytes

    def __getstate__(self) -> dict[str, Any]:
        """The arguments, which is what workers and checkpoints carry."""
        own = {name: getattr(self, name) for name in ("num_neighbors", "replace", "weights", "induced")}
        return own | self._drawing

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        """Everything that minibatches depend on."""
        text = ", replace=True" if self.replace else ""
        if self.disjoint:
            strategy = self._drawing["strategy"]
            text += f", disjoint=True, temporal={self.temporal!r}, strategy={strategy!r}"
        text += ", induced=True" if self.induced else ""
        if self.weights is not None:
            if self._digests is None:  # of all edges
                self._digests = {r: array_digest(w) for r, w in self.weights.items()}
            text += f", weights={self._digests}"
        return f"HopSampler({self.num_neighbors}{text})"

    def _induced(
        self,
        topology: Topology,
        nodes: dict[str, torch.Tensor],
        batch: dict[str, torch.Tensor],
        trees: Trees | None,
    ) -> dict[Relation, HopEdges]:
        """All edges among the nodes, within trees if there are trees."""
        among: AnySeeds = _per_type(topology, nodes)
        if trees is not None:
            among = PlantedNodes(_per_type(topology, nodes), _per_type(topology, batch), trees)
        blocks = self._planter.induced(topology, among)
        return {r: HopEdges(torch.stack(b.coo()), b.edge_ids, None) for r, b in blocks.items()}

    def _expansion_of(self, topology: Topology) -> _Expansion:
        if self._expansion is None or self._expansion[0] is not topology:
            self._expansion = topology, _Expansion(topology)
        return self._expansion[1]

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
            **self._drawing,
        )
        self._neighbor = (expansion.relations, neighbor)
        return neighbor


def _per_type(topology: Topology, values: dict[str, torch.Tensor]) -> PerType:
    return next(iter(values.values())) if topology.homogeneous else values


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= -1


def _joined(hops: list[tuple[Block, int]], device: torch.device) -> HopEdges:
    """Join the hops' blocks, each with the position of its first destination among the nodes.

    Uses NumPy on the CPU: torch would start threads, which takes longer than the work if cores are busy.
    """
    per_hop = [block.num_edges for block, _ in hops]
    blocks = [block for block, _ in hops]
    if not hops:
        none = torch.empty((2, 0), dtype=torch.int64, device=device)
        return HopEdges(none, none[0], per_hop)
    if device.type == "cpu":
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
        if topology.drawn_by is not None:
            self.topology.drawn_by = topology.drawn_by.of_copies(self.topology)
        self.relations = self.topology.relations
        self.named = dict(zip(topology.relations, self.relations, strict=True))

    def seeds(self, nodes: dict[str, torch.Tensor], begins: dict[str, int]) -> dict[str, torch.Tensor]:
        """All nodes by type, and the newest, which begin at `begins`, by the names of the copies."""
        types = self.topology.node_types
        every = {**nodes, **{self._newest[t]: nodes[t][begin:] for t, begin in begins.items()}}
        return {t: ids for t, ids in every.items() if t in types}

    def _to_newest(self, either: AnyGraph) -> AnyGraph:
        graph = either if isinstance(either, Graph) else either.graph
        src, name, dst = graph.relation
        changed = replace(graph, relation=(src, name, self._newest[dst]))
        if isinstance(either, Graph):
            return changed
        other = copy.copy(either)  # the same memory, which lives while the topology does
        other.graph = changed
        return other
