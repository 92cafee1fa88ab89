"""Topology: numbered relations and node types for samplers; and the Sampler protocol.

Temporal sampling relies on an order of a graph's edges by time, which is checked and made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gids import _core
from gids.cuda import Device
from gids.errors import MissingError
from gids.sampler.device import PinnedGraph
from gids.sampler.minibatch import Minibatch, PerType
from gids.store import Graph
from gids.store.feature_store import first_out_of_order
from gids.store.names import Relation, describe_type

AnyGraph = Graph | PinnedGraph
Graphs = AnyGraph | Sequence[AnyGraph] | Mapping[Relation, AnyGraph]
By = Literal["edges", "nodes"]
"""Whose times bound the neighbors: those of the edges, or those of their sources."""


class Sampler(Protocol):
    """The sampler argument of gids.NodeLoader. The minibatch depends only on the arguments.

    seeds: int64[n], or by node type; TimedSeeds if the loader has times.

    A sampler with an attribute ``repeatable = True`` states that nothing which its minibatches depend on
    changes while its loader exists. Then a loader may sample an epoch before the one before it has ended.

    The minibatches of a sampler with an attribute ``spans_epochs = True`` depend on each other over epochs:
    a loader passes epoch=0 and, as step, the number of all steps before, epoch * len(loader) + position.
    Those of gids.sampler with a batch_dependency have it.
    """

    def sample(
        self, graphs: Graphs | Topology, seeds: Any, *, seed: int = 0, epoch: int = 0, step: int = 0
    ) -> Minibatch: ...


class Topology:
    """The graphs to sample from: one or several relations, all on the CPU or all pinned for one device.

    Make it once for many minibatches. A single graph from a type to itself is homogeneous: seeds and results
    are tensors. A sequence or dictionary of graphs is heterogeneous: seeds and results are dictionaries by
    node type.

    Attributes: graphs; pinned (empty on the CPU); device (None: the CPU); homogeneous; relations; node_types
    and node_counts, in order of first mention; drawn_by: what samples with other processes, by
    sample_steps(), if the edges are not here (gids.distributed); else None.

    Raises TypeError and ValueError for inconsistent graphs.
    """

    def __init__(self, graphs: Graphs) -> None:
        listed: list[AnyGraph]
        self.homogeneous = isinstance(graphs, Graph | PinnedGraph)
        if isinstance(graphs, Graph | PinnedGraph):
            listed = [graphs]
        else:
            listed = list(graphs.values() if isinstance(graphs, Mapping) else graphs)
        if not listed or not all(isinstance(g, Graph | PinnedGraph) for g in listed):
            raise TypeError(
                "graphs must be a Graph or a PinnedGraph, or a sequence or dictionary of one or more of them"
            )
        self.pinned = [g for g in listed if isinstance(g, PinnedGraph)]
        self.device: Device | None = self.pinned[0].device if self.pinned else None
        if self.pinned and (
            len(self.pinned) < len(listed) or any(g.device is not self.device for g in self.pinned)
        ):
            raise ValueError(
                "some graphs are not pinned, or for another device: pin all for one device, or none"
            )
        self.graphs = [g.graph if isinstance(g, PinnedGraph) else g for g in listed]
        counts: dict[str, int] = {}
        for graph in self.graphs:
            for ntype, count in ((graph.relation[0], graph.num_src), (graph.relation[2], graph.num_dst)):
                if counts.setdefault(ntype, count) != count:
                    raise ValueError(
                        f"{describe_type(graph.relation)} has {count} {ntype!r} nodes, but another "
                        f"relation has {counts[ntype]}"
                    )
        for graph in self.graphs:
            _check_arrays(graph)
        for ntype, count in counts.items():
            if count > _core.MAX_NODES:
                raise ValueError(
                    f"{count} {ntype!r} nodes: samplers support at most {_core.MAX_NODES} of a type"
                )
        self.relations = [g.relation for g in self.graphs]
        if len(set(self.relations)) < len(self.relations):
            raise ValueError(f"a relation is given twice: {', '.join(map(describe_type, self.relations))}")
        if self.homogeneous and len(counts) > 1:
            raise ValueError(
                f"{describe_type(self.relations[0])} leads from one node type to another: pass [graph], "
                "and seeds by node type"
            )
        self.drawn_by: Any = None
        self._times: dict[By, list[tuple[np.ndarray, bool] | None]] = {}
        self.node_types = list(counts)
        self.node_counts = list(counts.values())

    @classmethod
    def of(cls, graphs: Graphs | Topology) -> Topology:
        """graphs itself if it is a Topology."""
        return graphs if isinstance(graphs, Topology) else cls(graphs)

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """(source type, destination type) of each relation, as indices of node_types."""
        index = {ntype: i for i, ntype in enumerate(self.node_types)}
        return [(index[r[0]], index[r[2]]) for r in self.relations]

    def check_open(self) -> None:
        """Raise ValueError if a PinnedGraph is closed."""
        if any(p.closed for p in self.pinned):
            raise ValueError("a PinnedGraph of this topology is closed: pin the graph again")

    def node_times(self, ntype: str) -> np.ndarray | None:
        """The times of the nodes of a type, if its graphs have them."""
        for graph in self.graphs:
            ends = ((graph.relation[0], graph.src_times), (graph.relation[2], graph.dst_times))
            for end, times in ends:
                if end == ntype and times is not None:
                    return times
        return None

    def times(self, by: By) -> list[tuple[np.ndarray, bool] | None]:
        """By relation: (times of its edges or sources, whether they are of sources), or None.

        Raises ValueError if no relation has such times, or if edges are not in their order; that is checked
        once.
        """
        if by not in self._times:
            listed = [times_of(graph, by) for graph in self.graphs]
            if all(times is None for times in listed):
                raise ValueError(
                    f"temporal={by!r}: no relation of the dataset has times of {by}: `gids convert` stores "
                    "them; for a graph of your own use dataclasses.replace(graph, edge_times=…)"
                )
            for graph, times in zip(self.graphs, listed, strict=True):
                _check_times(graph, times, by)
                check_time_order(graph, by)
            self._times[by] = [
                None if t is None else (np.ascontiguousarray(t), by == "nodes") for t in listed
            ]
        return self._times[by]

    @cached_property
    def native(self) -> _core.NeighborTopology:
        """The topology for the native CPU samplers."""
        topology = _core.NeighborTopology(
            [(count, repr(ntype)) for ntype, count in zip(self.node_types, self.node_counts, strict=True)]
        )
        for graph, (src, dst) in zip(self.graphs, self.ends, strict=True):
            topology.add(graph.indptr, graph.indices, src, dst, describe_type(graph.relation))
        return topology

    def seeds_by_type(self, seeds: PerType, *, what: str = "seeds") -> list[torch.Tensor]:
        """int64[n] for each of node_types. seeds: int64[n] or bool[num_nodes], by type if there are several.

        what: the name of other numbers, such as the seeds' times: int64[n] only.

        Raises TypeError, KeyError and ValueError for wrong seeds.
        """
        if self.homogeneous:
            if isinstance(seeds, dict):
                raise TypeError(f"{what} is a dictionary: with one graph give a tensor, int64[n]")
            return [_check_ids(seeds, self.node_types[0], self.node_counts[0], what)]
        if not isinstance(seeds, dict):
            raise TypeError(f"{what} must be a dictionary, node type -> int64[n], with several relations")
        for ntype in seeds:
            if ntype not in self.node_types:
                known = ", ".join(map(repr, self.node_types))
                raise MissingError(f"{what} of type {ntype!r}: no relation has it (there are {known})")
        none = torch.empty(0, dtype=torch.int64)
        return [
            _check_ids(seeds.get(ntype, none), ntype, count, what)
            for ntype, count in zip(self.node_types, self.node_counts, strict=True)
        ]


def _check_arrays(graph: Graph) -> None:
    """Check a Graph that was not made by a store."""
    what = f"the graph of {describe_type(graph.relation)}"
    if graph.indptr.dtype != np.int64 or graph.indices.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{what} must have indptr int64 and indices int32 or int64 (got indptr {graph.indptr.dtype} and "
            f"indices {graph.indices.dtype})"
        )
    if graph.indptr.shape != (graph.num_dst + 1,) or graph.indices.ndim != 1:
        raise ValueError(
            f"{what} has {graph.num_dst} destinations; it needs indptr[{graph.num_dst + 1}] and indices of "
            f"one dimension (got {list(graph.indptr.shape)} and {graph.indices.ndim})"
        )


def _check_times(graph: Graph, times: np.ndarray | None, by: By) -> None:
    """Check times of a Graph that was not made by a store."""
    count = graph.num_edges if by == "edges" else graph.num_src
    if times is not None and (times.dtype not in (np.int32, np.int64) or times.shape != (count,)):
        raise TypeError(
            f"times of {by} of {describe_type(graph.relation)} must be int32 or int64[{count}] (got "
            f"{times.dtype}{list(times.shape)})"
        )


def _check_ids(ids: torch.Tensor | np.ndarray, ntype: str, count: int, what: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(ids)) if isinstance(ids, np.ndarray) else ids
    masks = what == "seeds"
    give = f"give int64[n], or bool[{count}], a mask of all nodes" if masks else "give int64[n]"
    if not isinstance(tensor, torch.Tensor):
        or_mask = f" or bool[{count}]" if masks else ""
        raise TypeError(f"{what} of {ntype!r} are {type(ids).__name__}: give a tensor, int64[n]{or_mask}")
    if masks and tensor.dtype == torch.bool and tensor.shape == (count,):
        return tensor.nonzero().view(-1)
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise TypeError(f"{what} of {ntype!r} are {tensor.dtype}{list(tensor.shape)}: {give}")
    return tensor.contiguous()


def times_of(graph: Graph, by: By) -> np.ndarray | None:
    """int32 or int64[num_edges], or [num_src]; None if the graph has no such times."""
    return graph.edge_times if by == "edges" else graph.src_times


def check_time_order(graph: Graph, by: By) -> None:
    """Raise ValueError if the edges of a destination are not in the order of their times.

    Reads all edges, unless the graph is from a dataset that is sorted in this way.
    """
    if graph.sorted_by == by or times_of(graph, by) is None:
        return
    position = first_out_of_order(graph, by)
    if position is not None:
        raise ValueError(
            f"the edges of {describe_type(graph.relation)} are not sorted by the times of {by} (at position "
            f"{position}): sort the graph with gids.sampler.sort_by_time(graph, {by!r})"
        )


def sort_by_time(graph: Graph, by: By) -> Graph:
    """The graph with each destination's edges in the order of time: `by` "edges" or "nodes".

    Edges of equal times keep their order and their ids. Takes about 40 bytes of memory per edge; of a graph
    that is in this order already no array is copied. Raises ValueError if the graph has no such times.
    """
    times = times_of(graph, by)
    if times is None:
        raise ValueError(
            f"{describe_type(graph.relation)} has no times of {by}: use dataclasses.replace(graph, "
            f"{'edge_times' if by == 'edges' else 'src_times'}=…)"
        )
    if graph.sorted_by == by or first_out_of_order(graph, by) is None:
        return replace(graph, sorted_by=by)
    of_edges = times if by == "edges" else times[graph.indices]
    destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
    order = np.lexsort([of_edges, destinations])
    return replace(
        graph,
        indices=graph.indices[order],
        edge_ids=order if graph.edge_ids is None else graph.edge_ids[order],
        edge_times=None if graph.edge_times is None else graph.edge_times[order],
        sorted_by=by,
    )
