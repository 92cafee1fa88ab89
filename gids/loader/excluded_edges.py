"""Leaves edges out of sampled blocks. Called by EdgeLoader."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from gids.sampler import Block, Minibatch
from gids.store.names import Relation


def without_edges(minibatch: Minibatch, relation: Relation, edges: torch.Tensor) -> None:
    """Remove the edges of a relation from edges[0, i] to edges[1, i] from all blocks. Input nodes stay.

    edges: int64[2, n], node ids, on the minibatch's device. Raises TypeError for a minibatch without blocks.
    """
    if not minibatch.blocks:
        raise TypeError(
            "exclude= needs a sampler that makes blocks, and this one makes none: use exclude=None"
        )
    nodes = minibatch.input_nodes
    src, dst = (nodes[t] if isinstance(nodes, dict) else nodes for t in relation[::2])
    layers: list[Any] = list(minibatch.blocks)
    for layer, blocks in enumerate(layers):
        if isinstance(blocks, dict):
            if relation not in blocks:
                raise TypeError(
                    f"exclude= needs blocks of {relation}, and this sampler makes none: use exclude=None"
                )
            layers[layer] = blocks | {relation: _without(blocks[relation], src, dst, edges)}
        else:
            layers[layer] = _without(blocks, src, dst, edges)
    minibatch.blocks = layers


def _without(block: Block, src: torch.Tensor, dst: torch.Tensor, edges: torch.Tensor) -> Block:
    """src, dst: the minibatch's nodes of the relation's types."""
    from_local, to_local = block.coo()
    left_out = torch.isin(_keys(src[from_local], dst[to_local]), _keys(*edges))
    keep = ~left_out
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    values: dict[str, Any] = {f.name: getattr(block, f.name) for f in fields(block)}
    of_edges = {n: v[keep] for n, v in values.items() if isinstance(v, torch.Tensor) and n != "indptr"}
    return Block(**{**values, **of_edges, "indptr": before[block.indptr]})


def _keys(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """One number for each pair of ids, which are below 2^32."""
    return dst << 32 | src
