"""PyG's sampler outputs from HopMinibatches and back. Called by samplers; knows no stores and no loaders."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import torch
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from gids.pyg.hops import HopEdges, HopMinibatch
from gids.sampler import Topology

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput
K = TypeVar("K")


def output_of(drawn: HopMinibatch) -> Output:
    """The same minibatch as PyG's samplers return it."""
    edges, nodes = drawn.edges, drawn.input_nodes
    if isinstance(nodes, torch.Tensor):
        (of_hops,) = edges.values()
        return SamplerOutput(
            node=nodes,
            row=of_hops.index[0],
            col=of_hops.index[1],
            edge=of_hops.ids,
            batch=drawn.batch,
            num_sampled_nodes=_only(drawn.nodes_per_hop),
            num_sampled_edges=of_hops.per_hop,
            metadata=drawn.metadata,
        )
    return HeteroSamplerOutput(
        node=dict(nodes),
        row={r: e.index[0] for r, e in edges.items()},
        col={r: e.index[1] for r, e in edges.items()},
        edge={r: e.ids for r, e in edges.items()},
        batch=drawn.batch,
        num_sampled_nodes=drawn.nodes_per_hop,
        num_sampled_edges={r: e.per_hop for r, e in edges.items()},
        metadata=drawn.metadata,
    )


def minibatch_of(
    output: Output, topology: Topology, permutation: Any, device: torch.device, *, epoch: int, step: int
) -> HopMinibatch:
    """A HopMinibatch of an output, on a device. permutation: the sampler's edge_permutation.

    Raises TypeError for an output that is not of the topology's kind.
    """
    if isinstance(output, HeteroSamplerOutput) is topology.homogeneous:
        kind = "SamplerOutput" if topology.homogeneous else "HeteroSamplerOutput"
        raise TypeError(f"the sampler returned a {type(output).__name__}; this loader needs a {kind}")
    if topology.homogeneous:
        (relation,), (ntype,) = topology.relations, topology.node_types
        per_hop = None if output.num_sampled_nodes is None else {ntype: list(output.num_sampled_nodes)}
        edges = {relation: _edges(output, None, permutation, device)}
        return HopMinibatch(
            torch.empty(0, dtype=torch.int64),
            output.node.to(device),
            [],
            epoch,
            step,
            batch=None if output.batch is None else output.batch.to(device),
            edges=edges,
            nodes_per_hop=per_hop,
            metadata=tuple(output.metadata or ()),
        )
    none = torch.empty(0, dtype=torch.int64)
    sampled = output.num_sampled_nodes
    return HopMinibatch(
        {},
        {t: output.node.get(t, none).to(device) for t in topology.node_types},
        [],
        epoch,
        step,
        batch=None if output.batch is None else {t: of.to(device) for t, of in output.batch.items()},
        edges={
            r: _edges(output, r, None if permutation is None else permutation.get(r), device)
            for r in topology.relations
        },
        nodes_per_hop=None if sampled is None else {t: list(n) for t, n in sampled.items()},
        metadata=tuple(output.metadata or ()),
    )


def _edges(output: Output, relation: Any, permutation: torch.Tensor | None, device: torch.device) -> HopEdges:
    none = torch.empty(0, dtype=torch.int64)
    row, col, ids, per_hop = (
        _of(values, relation, default)
        for values, default in (
            (output.row, none),
            (output.col, none),
            (output.edge, none),
            (output.num_sampled_edges, None),
        )
    )
    index = torch.stack([row, col]).to(device, torch.int64)
    if ids is not None:
        ids = ids.to(torch.int64)
        ids = (ids if permutation is None else permutation[ids]).to(device)
    return HopEdges(index, ids, None if per_hop is None else list(per_hop))


def _of(values: Any, relation: Any, default: Any) -> Any:
    """The values of a relation; None: of the only one."""
    return values if relation is None or values is None else values.get(relation, default)


def _only(values: dict[K, Any] | None) -> Any:
    return None if values is None else next(iter(values.values()))
