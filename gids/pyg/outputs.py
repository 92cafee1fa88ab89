"""PyG's sampler outputs from HopMinibatches and back. Called by samplers; knows no stores and no loaders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from gids.pyg.hops import HopEdges, HopMinibatch
from gids.sampler import Topology
from gids.store.names import Relation

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput
K = TypeVar("K")


def output_of(drawn: HopMinibatch) -> Output:
    """The same minibatch as PyG's samplers return it."""
    edges, nodes = drawn.edges, drawn.input_nodes
    if isinstance(nodes, torch.Tensor):
        (hops,) = edges.values()
        return SamplerOutput(
            node=nodes,
            row=hops.index[0],
            col=hops.index[1],
            edge=hops.ids,
            batch=drawn.batch,
            num_sampled_nodes=_only(drawn.nodes_per_hop),
            num_sampled_edges=hops.per_hop,
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


def bidirectional(output: Output) -> Output:
    """The output with the reverses of its edges. On the CPU: on a GPU, PyG keeps any of parallel edges."""
    nodes = output.node if isinstance(output, SamplerOutput) else next(iter(output.node.values()))
    return _edges_to(nodes.device, _edges_to(torch.device("cpu"), output).to_bidirectional())


def _edges_to(device: torch.device, output: Output) -> Output:
    def moved(ids: Any) -> Any:
        if isinstance(ids, dict):
            return {relation: moved(of_one) for relation, of_one in ids.items()}
        return ids if ids is None else ids.to(device)

    return replace(output, **{name: moved(getattr(output, name)) for name in ("row", "col", "edge")})


def minibatch_of(
    output: Output, topology: Topology, permutation: Any, device: torch.device, *, epoch: int, step: int
) -> HopMinibatch:
    """A HopMinibatch of an output, on a device. permutation: the sampler's edge_permutation.

    Raises TypeError for an output that is not of the topology's kind.
    """
    homogeneous = topology.homogeneous
    if isinstance(output, HeteroSamplerOutput) is homogeneous:
        kind = "SamplerOutput" if homogeneous else "HeteroSamplerOutput"
        raise TypeError(f"the sampler returned a {type(output).__name__}; this loader needs a {kind}")
    none = torch.empty(0, dtype=torch.int64)

    def by_type(values: Any) -> dict[str, Any]:
        return {topology.node_types[0]: values} if homogeneous else values

    def part(values: Any, relation: Relation, default: Any) -> Any:
        return values if homogeneous or values is None else values.get(relation, default)

    edges = {}
    for relation in topology.relations:
        row, col = (part(ends, relation, none) for ends in (output.row, output.col))
        ids, permuted = part(output.edge, relation, none), part(permutation, relation, None)
        if ids is not None:
            ids = ids.to(torch.int64)
            ids = (ids if permuted is None else permuted[ids]).to(device)
        per_hop = part(output.num_sampled_edges, relation, None)
        index = torch.stack([row, col]).to(device, torch.int64)
        edges[relation] = HopEdges(index, ids, None if per_hop is None else list(per_hop))
    sampled = by_type(output.node)
    nodes = {t: sampled.get(t, none).to(device) for t in topology.node_types}
    batch = None
    if output.batch is not None:
        batch = {t: trees.to(device) for t, trees in by_type(output.batch).items()}
    per_hop = output.num_sampled_nodes
    return HopMinibatch(
        none.to(device) if homogeneous else {},
        _only(nodes) if homogeneous else nodes,
        [],
        epoch,
        step,
        batch=_only(batch) if homogeneous else batch,
        edges=edges,
        nodes_per_hop=None if per_hop is None else {t: list(n) for t, n in by_type(per_hop).items()},
        metadata=tuple(output.metadata or ()),
    )


def _only(values: dict[K, Any] | None) -> Any:
    return None if values is None else next(iter(values.values()))
