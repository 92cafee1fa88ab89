"""NeighborSampler: gids' sampling as PyG's BaseSampler, for PyG's own loaders. Users make it."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    NumNeighbors,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from gids.pyg.arguments import refuse_other_values
from gids.pyg.attributes import is_homogeneous
from gids.pyg.edge_weights import Weights, checked, in_order, stored_weights
from gids.pyg.hops import Counts, HopSampler
from gids.pyg.num_neighbors import counts_of
from gids.pyg.stores import store_of
from gids.sampler import Topology
from gids.store import Graph, graphs_of
from gids.store.names import RELATION, Relation, describe_type


class NeighborSampler(BaseSampler):  # type: ignore[misc]  # PyG is not typed
    """Neighbour sampling for PyG's loaders, without pyg-lib and torch-sparse.

    data: the data of the loader: Data or HeteroData in memory, or (gids.pyg.FeatureStore,
    gids.pyg.GraphStore), or gids.open(...), a path or a gids.FeatureStore. num_neighbors: as in PyG. replace,
    weight_attr: as in gids.pyg.NeighborLoader; for Data in memory the name of an attribute of its edges.
    threads: number of sampling threads (default: torch's number, which is 1 in workers of a DataLoader).
    is_sorted and share_memory of PyG's sampler are accepted and have no effect.

    ``torch_geometric.loader.NodeLoader(data, node_sampler=NeighborSampler(data, [10, 10]), …)``, or
    ``LinkLoader`` with ``link_sampler=``. Each minibatch takes one random number from torch's generator, so
    torch.manual_seed repeats a run, and workers differ.

    Raises TypeError for other data and for an argument that PyG's sampler does not have, ValueError for
    num_neighbors and for an argument of PyG that is not supported (disjoint, times, subgraph_type and
    others), KeyError and FormatError for a dataset without topology. While sampling: IndexError for a seed
    out of range, ValueError for seeds with times (input_time, edge_label_time).
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Counts | NumNeighbors,
        *,
        replace: bool = False,
        weight_attr: str | None = None,
        threads: int | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        **options: Any,
    ) -> None:
        refuse_other_values(options)
        if options:
            raise TypeError(f"gids.pyg.NeighborSampler has no argument {next(iter(options))!r}")
        self._made_of = (data, num_neighbors, replace, weight_attr, threads)
        if isinstance(data, Data | HeteroData):
            self._graphs = _graphs_in_memory(data)
            self._homogeneous = isinstance(data, Data)
            weights = None if weight_attr is None else _weights_in_memory(data, self._graphs, weight_attr)
        else:
            store = store_of(data)
            self._graphs = graphs_of(store)
            self._homogeneous = is_homogeneous(store)
            weights = None if weight_attr is None else stored_weights(store, self._graphs, weight_attr)
        counts = counts_of(num_neighbors, None if self._homogeneous else [g.relation for g in self._graphs])
        # the last iterator that was made in this process
        self._samplers = [HopSampler(counts, replace=replace, weights=weights, threads=threads)]
        self._topology = self._new_topology()
        self._process = os.getpid()

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput | HeteroSamplerOutput:
        """PyG's entry for NodeLoader."""
        _refuse_times(index, "input_time")
        return node_sample(index, self._sample)

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """PyG's entry for LinkLoader."""
        _refuse_times(index, "edge_label_time")
        counts = dict(zip(self._topology.node_types, self._topology.node_counts, strict=True))
        num_nodes = next(iter(counts.values())) if self._homogeneous else counts
        return edge_sample(index, self._sample, num_nodes, False, None, neg_sampling)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, self._made_of

    def _sample(
        self, seed: torch.Tensor | dict[str, torch.Tensor], seed_time: object = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        if self._process != os.getpid():  # a forked worker: threads stay behind
            self._samplers.append(HopSampler(**self._samplers[-1].__getstate__()))
            self._topology = self._new_topology()
            self._process = os.getpid()
        number = int(torch.randint(torch.iinfo(torch.int64).max, ()))
        drawn = self._samplers[-1].sample(self._topology, seed, seed=number)
        edges = drawn.edges
        if isinstance(drawn.input_nodes, torch.Tensor):
            (of_hops,) = edges.values()
            return SamplerOutput(
                node=drawn.input_nodes,
                row=of_hops.index[0],
                col=of_hops.index[1],
                edge=of_hops.ids,
                num_sampled_nodes=next(iter(drawn.nodes_per_hop.values())),
                num_sampled_edges=of_hops.per_hop,
            )
        return HeteroSamplerOutput(
            node=drawn.input_nodes,
            row={r: e.index[0] for r, e in edges.items()},
            col={r: e.index[1] for r, e in edges.items()},
            edge={r: e.ids for r, e in edges.items()},
            num_sampled_nodes=drawn.nodes_per_hop,
            num_sampled_edges={r: e.per_hop for r, e in edges.items()},
        )

    def _new_topology(self) -> Topology:
        return Topology(self._graphs[0] if self._homogeneous else self._graphs)


def _refuse_times(index: NodeSamplerInput | EdgeSamplerInput, argument: str) -> None:
    if index.time is not None:
        raise ValueError(
            f"the seeds have times ({argument}=), and gids.pyg.NeighborSampler does not sample by time: "
            "leave them out, or use PyG's own NeighborSampler with time_attr=, which needs pyg-lib"
        )


def _remade(
    data: Any, num_neighbors: Any, replace: bool, weight_attr: str | None, threads: int | None
) -> NeighborSampler:
    made = NeighborSampler(data, num_neighbors, replace=replace, weight_attr=weight_attr, threads=threads)
    # A spawned worker of PyTorch ends while daemon threads run. Python then does not free its arguments, such
    # as this sampler, and nanobind would report the native parts as leaked.
    weakref.finalize(made, made.__dict__.clear)  # runs at exit, too
    return made


def _graphs_in_memory(data: Data | HeteroData) -> list[Graph]:
    """A copy of the topology, sorted by destination: 16 bytes per edge. Edges to a node keep their order."""
    if isinstance(data, Data):
        return [_graph(data, RELATION, data.num_nodes, data.num_nodes)]
    counts = {ntype: data[ntype].num_nodes for ntype in data.node_types}
    return [
        _graph(storage, relation, counts[relation[0]], counts[relation[2]])
        for relation, storage in data.edge_items()
    ]


def _weights_in_memory(data: Data | HeteroData, graphs: list[Graph], attribute: str) -> Weights:
    found = {}
    for graph in graphs:
        storage = data if isinstance(data, Data) else data[graph.relation]
        if attribute in storage:
            found[graph.relation] = in_order(graph, storage[attribute], attribute)
    return checked(found, attribute, "the data")


def _graph(storage: Any, relation: Relation, num_src: int, num_dst: int) -> Graph:
    if "edge_index" not in storage:
        raise TypeError(f"{describe_type(relation)} has no edge_index: give its edges as edge_index")
    row, col = storage.edge_index.cpu()
    order = col.argsort(stable=True)
    for what, ids, limit in (("comes from", row, num_src), ("leads to", col, num_dst)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
            raise IndexError(
                f"edge_index of {describe_type(relation)} {what} nodes {int(ids.min())} to {int(ids.max())}; "
                f"ids run from 0 to {limit - 1}"
            )
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(col, minlength=num_dst), 0, out=indptr[1:])
    return Graph(relation, num_src, num_dst, indptr.numpy(), row[order].numpy(), order.numpy())
