"""Leaves edges out of sampled blocks. Called by EdgeLoader."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import torch

from gids.sampler import Block, Minibatch
from gids.store.names import Relation, describe_type


def without_edges(minibatch: Minibatch, relation: Relation, edges: torch.Tensor) -> None:
    """Remove the edges of a relation from edges[0, i] to edges[1, i] from all blocks, and the reverse edges
    that a bidirectional subgraph made from them. Input nodes stay.

    edges: int64[2, n], node ids, on the minibatch's device. Raises TypeError for a minibatch without blocks
    of the relation.
    """
    if not minibatch.blocks:
        raise _missing("blocks")
    nodes, layers = minibatch.input_nodes, []
    for layer in minibatch.blocks:
        blocks = layer if isinstance(layer, dict) else {layer.relation: layer}
        if relation not in blocks:
            raise _missing(f"blocks of {describe_type(relation)}")
        kept = {}
        for name, block in blocks.items():
            src, dst = (nodes[t] if isinstance(nodes, dict) else nodes for t in name[::2])
            kept[name] = _without(block, src, dst, relation, edges)
        layers.append(kept if isinstance(layer, dict) else kept[relation])
    minibatch.blocks = cast(Any, layers)


def _missing(what: str) -> TypeError:
    return TypeError(f"exclude= needs a sampler that makes {what}, and this one does not: use exclude=None")


def _without(
    block: Block, src: torch.Tensor, dst: torch.Tensor, relation: Relation, edges: torch.Tensor
) -> Block:
    """src, dst: the minibatch's nodes of the types of the block."""
    of_relation = block.relation == relation
    made_from_it = block.reverse is not None and block.reverse.relation == relation
    if not (of_relation or made_from_it):
        return block
    from_local, to_local = block.coo()
    sources, destinations, keys = src[from_local], dst[to_local], _keys(*edges)
    left_out = torch.zeros_like(from_local, dtype=torch.bool)
    if of_relation:
        left_out |= torch.isin(_keys(sources, destinations), keys)
    if made_from_it:
        left_out |= (block.positions < 0) & torch.isin(_keys(destinations, sources), keys)
    keep = ~left_out
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    values: dict[str, Any] = {f.name: getattr(block, f.name) for f in fields(block)}
    of_edges = {n: v[keep] for n, v in values.items() if isinstance(v, torch.Tensor) and n != "indptr"}
    return Block(**{**values, **of_edges, "indptr": before[block.indptr]})


def _keys(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """One number for each pair of ids, which are below 2^32."""
    return dst << 32 | src
