"""Sampling like PyG: in each hop, only the nodes that the previous hop found draw neighbors.

gids.sampler.Neighbor samples like DGL: in each layer, all nodes found so far draw. The attributes that
sampling depends on are here too: times and weights of nodes and edges. Needs no PyG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from gids.errors import MissingError
from gids.sampler import Block, Minibatch, Neighbor, Topology, sort_by_time
from gids.sampler.forest import AnySeeds, Given, per_type
from gids.sampler.layered import Layers, Seed, chosen_seed
from gids.sampler.neighbor import Strategy
from gids.sampler.topology import By, Graphs, times_of
from gids.store import Graph
from gids.store.names import Relation, describe_type

Counts = list[int] | Mapping[Relation, list[int]]
STORED = "time"
"""PyG's name of the times that `gids convert` stores."""
Weights = dict[Relation, np.ndarray]
"""By relation, if it has weights: float32[num_edges] in the order of graph.indices."""
Find = Callable[[str | Relation, str], torch.Tensor | None]
"""Reads the table of a type of nodes or edges that has this name in PyG; None if there is none."""
_LEAST_WEIGHT = np.finfo(np.float32).tiny
"""In place of 0: PyG, unlike gids.sampler.Neighbor, samples edges of weight 0 if a node has no more edges
than the fanout, or no others are left. -ln(u) is in 2**-54 to 38, so weights above 1e-20 come first."""


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


class HopSampler(Neighbor):
    """Each node draws neighbors once, in the hop after it was found.

    num_neighbors: for each hop, the seeds' hop first (PyG's order), the number of neighbors that a node
    draws: 1 or more, -1 for all, 0 for none; or such a list for each relation. Without hops a minibatch has
    the seeds alone. induced: yield all edges among the nodes that were found; on the CPU. Other arguments are
    those of gids.sampler.Neighbor; weights are by relation, and sampled edges have none.

    Minibatches are HopMinibatches, which depend on the same as Neighbor's.
    """

    newest = True
    _numbers_are = "num_neighbors"
    _options = ("replace", "disjoint", "temporal", "strategy", "induced", "weights")

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
        self.num_neighbors, self.induced, self._hop_count = num_neighbors, induced, lengths.pop()
        super().__init__(
            [-1],  # fanouts_of() returns the numbers
            replace=replace,
            weights=weights,
            disjoint=disjoint,
            temporal=temporal,
            strategy=strategy,
            subgraph="induced" if induced else "directional",
            threads=threads,
        )

    @property
    def layer_count(self) -> int:
        return self._hop_count

    def fanouts_of(self, topology: Topology) -> list[list[int]]:
        counts, relations = self.num_neighbors, topology.relations
        if not isinstance(counts, Mapping):
            counts = dict.fromkeys(relations, counts)
        elif counts.keys() != set(relations):
            raise ValueError(
                f"num_neighbors has {sorted(counts)}, but the graph has {sorted(relations)}: give "
                "a list for each relation (zeros leave it out)"
            )
        return [[counts[relation][hop] for relation in relations] for hop in range(self._hop_count)]

    def sample(
        self, graphs: Graphs | Topology, seeds: AnySeeds, *, seed: Seed = None, epoch: int = 0, step: int = 0
    ) -> HopMinibatch:
        """Sample one minibatch. Arguments, device and errors are as in gids.sampler.Neighbor.sample."""
        topology, seed = Topology.of(graphs), chosen_seed(seed)
        if topology.drawn_by is None:
            sampled = super().sample(topology, seeds, seed=seed, epoch=epoch, step=step)
        else:
            [sampled] = topology.drawn_by.sample_steps(
                self, topology, [seeds], seed=seed, epoch=epoch, first_step=step
            )
        assert isinstance(sampled, HopMinibatch)
        return sampled

    def finish(
        self, topology: Topology, checked: Given, layers: Layers, epoch: int, step: int
    ) -> HopMinibatch:
        nodes, hops, batch = layers
        made = HopMinibatch(
            per_type(topology, checked.ids),
            per_type(topology, nodes, empty=True),
            [],
            epoch,
            step,
            batch=per_type(topology, batch, empty=True) if batch else None,
        )
        if self.induced:
            made.edges = {b.relation: HopEdges(torch.stack(b.coo()), b.edge_ids, None) for b in hops[0]}
            made.nodes_per_hop = None
            return made
        sizes = [[len(ids) for ids in checked.ids]]  # by hop and node type: nodes found so far
        for blocks in hops:
            sizes.append(list(sizes[-1]))
            for block, (src, _) in zip(blocks, topology.ends, strict=True):
                sizes[-1][src] = block.num_src
        begins = [[0] * len(nodes), *sizes]
        for r, (relation, (_, dst)) in enumerate(zip(topology.relations, topology.ends, strict=True)):
            drawn = [(blocks[r], begin[dst]) for blocks, begin in zip(hops, begins, strict=False)]
            made.edges[relation] = _joined(drawn, nodes[0].device)
        new_nodes = np.diff(begins, axis=0)  # by hop, the seeds first
        made.nodes_per_hop = dict(zip(topology.node_types, new_nodes.T.tolist(), strict=True))
        return made


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


def with_times(graphs: Sequence[Graph], attribute: str, find: Find, name: str) -> tuple[list[Graph], By]:
    """The graphs with the times of this name, sorted by them, and whose times they are.

    A graph that is not in the order of these times is copied: about 24 bytes per edge. Raises KeyError if
    nothing has such times, ValueError if both nodes and edges have or if there is not one time each,
    TypeError for times that are not integers.
    """
    kinds: list[By] = ["edges", "nodes"]
    have = [by for by in kinds if any(times_of(g, by) is not None for g in graphs)]
    timed = list(graphs)
    if attribute != STORED or not have:
        counts: dict[str | Relation, int] = {}
        for graph in graphs:
            src, _, dst = graph.relation
            counts |= {src: graph.num_src, dst: graph.num_dst, graph.relation: graph.num_edges}
        times = {t: _times(find(t, attribute), count, t, attribute) for t, count in counts.items()}
        named = [t for t, values in times.items() if values is not None]
        have = [by for by in kinds if any(isinstance(t, str) == (by == "nodes") for t in named)]
        timed = [_timed(graph, times, have) for graph in graphs]
    if len(have) != 1:
        which, joint, error = ("both", "and", ValueError) if have else ("neither", "nor", MissingError)
        raise error(
            f"time_attr={attribute!r}: {which} nodes {joint} edges of {name} have an attribute of that name"
        )
    [by] = have
    return [g if times_of(g, by) is None else sort_by_time(g, by) for g in timed], by


def _timed(graph: Graph, times: Mapping[str | Relation, np.ndarray | None], have: list[By]) -> Graph:
    """The graph with these times in place of its own."""
    src, _, dst = graph.relation
    if "nodes" in have:
        return replace(graph, src_times=times[src], dst_times=times[dst], sorted_by=None)
    by_id = times[graph.relation]
    if by_id is not None and graph.edge_ids is not None:
        by_id = by_id[graph.edge_ids]
    return replace(graph, edge_times=by_id, sorted_by=None)


def weights_of(graphs: Sequence[Graph], attribute: str, find: Find, name: str) -> Weights:
    """The weights of the relations that have an attribute of this name.

    Raises KeyError if no relation has one, ValueError for weights that are not one number each.
    """
    by_relation = {}
    for graph in graphs:
        weights = find(graph.relation, attribute)
        if weights is not None:
            by_relation[graph.relation] = _in_order(graph, weights, attribute)
    if not by_relation:
        raise MissingError(f"weight_attr={attribute!r}: {name} has no edges with an attribute of that name")
    return by_relation


def _times(
    values: torch.Tensor | None, count: int, type_: str | Relation, attribute: str
) -> np.ndarray | None:
    """int64[count]. Raises TypeError, ValueError."""
    if values is None:
        return None
    if values.is_floating_point() or values.dtype == torch.bool:
        raise TypeError(f"{attribute!r} of {describe_type(type_)} is {values.dtype}; times must be integers")
    _check_count(values, count, type_, attribute)
    return values.reshape(-1).to(torch.int64).numpy()


def _in_order(graph: Graph, weights: torch.Tensor, attribute: str) -> np.ndarray:
    """Reorder weights by edge id to the order of graph.indices. Raises ValueError."""
    _check_count(weights, graph.num_edges, graph.relation, attribute)
    by_id = weights.reshape(-1).to(torch.float32).numpy()
    in_order = by_id if graph.edge_ids is None else by_id[graph.edge_ids]
    return in_order if in_order.all() else np.where(in_order == 0, _LEAST_WEIGHT, in_order)


def _check_count(values: torch.Tensor, count: int, type_: str | Relation, attribute: str) -> None:
    if values.shape[:1] != (count,) or values.numel() != count:
        raise ValueError(
            f"{attribute!r} of {describe_type(type_)} has shape {list(values.shape)}; it must have one "
            f"number for each of the {count} {'nodes' if isinstance(type_, str) else 'edges'}"
        )
