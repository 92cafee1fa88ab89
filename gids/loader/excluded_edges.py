"""Leaves edges out of what was sampled. Called by EdgeLoader; knows blocks alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from gids.sampler import Block, Minibatch
from gids.store.names import Relation


def without_edges(minibatch: Minibatch, relation: Relation, pairs: torch.Tensor) -> None:
    """Leave every edge of a relation out of all blocks that leads from pairs[0, i] to pairs[1, i].

    pairs: int64[2, n], local ids, on the minibatch's device. Input nodes stay. Raises TypeError for a
    minibatch without blocks.
    """
    if not minibatch.blocks:
        raise TypeError("edges can be excluded from blocks, and this sampler makes none; use exclude=None")
    layers: list[Any] = list(minibatch.blocks)
    for layer, blocks in enumerate(layers):
        if isinstance(blocks, dict):
            if relation not in blocks:
                raise TypeError(
                    f"edges of {relation} can be excluded from its blocks, and this sampler makes none; "
                    "use exclude=None"
                )
            layers[layer] = blocks | {relation: _without(blocks[relation], pairs)}
        else:
            layers[layer] = _without(blocks, pairs)
    minibatch.blocks = layers


def _without(block: Block, pairs: torch.Tensor) -> Block:
    src, dst = block.coo()
    left_out = torch.isin(dst * block.num_src + src, pairs[1] * block.num_src + pairs[0])
    keep = ~left_out
    before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    values: dict[str, Any] = {f.name: getattr(block, f.name) for f in fields(block)}
    of_edges = {n: v[keep] for n, v in values.items() if isinstance(v, torch.Tensor) and n != "indptr"}
    return Block(**{**values, **of_edges, "indptr": before[block.indptr]})
