"""Layers in plain torch, and the same over a whole graph in memory, which the tests compare with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gids.store.names import Relation

Rows = dict[str, torch.Tensor]


def mean_of_sources(block: Any, rows: torch.Tensor) -> torch.Tensor:
    src, dst = block.coo()
    total = torch.zeros(block.num_dst, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    total.index_add_(0, dst, rows[src])
    return total / block.indptr.diff().clamp(min=1).view(-1, *[1] * (rows.dim() - 1))


class Sage(torch.nn.Module):
    def __init__(self, in_dim: int, out_dim: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.own, self.other = (
            torch.nn.Parameter(torch.randn(in_dim, out_dim, generator=generator) / in_dim**0.5)
            for _ in range(2)
        )

    def forward(self, block: Any, h: torch.Tensor) -> torch.Tensor:
        return torch.relu(h[: block.num_dst] @ self.own + mean_of_sources(block, h @ self.other))


class HeteroSage(torch.nn.Module):
    """Sums over the relations that lead from a type with rows; types that none leads to have no output."""

    def __init__(self, dims: dict[str, int], relations: list[Relation], out_dim: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            r: torch.randn(dims[r[0]], out_dim, generator=generator) / dims[r[0]] ** 0.5
            for r in relations
            if r[0] in dims
        }

    def forward(self, blocks: dict[Relation, Any], h: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for relation, weight in self.weights.items():
            if relation[0] in h:
                part = mean_of_sources(blocks[relation], h[relation[0]] @ weight)
                found[relation[2]] = found[relation[2]] + part if relation[2] in found else part
        return {ntype: torch.relu(rows) for ntype, rows in found.items()}


def in_memory(
    model: list[Any], graphs: dict[Relation, Any], features: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """All layers over the whole graph. graphs: gids Graphs by relation."""

    def whole(graph: Any) -> Any:
        indptr = torch.from_numpy(np.array(graph.indptr))
        dst = torch.arange(graph.num_dst).repeat_interleave(indptr.diff())
        src = torch.from_numpy(np.array(graph.indices, np.int64))
        return SimpleNamespace(num_dst=graph.num_dst, indptr=indptr, coo=lambda: (src, dst))

    blocks = {relation: whole(graph) for relation, graph in graphs.items()}
    h = features
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, Sage):
                [block], [(ntype, rows)] = blocks.values(), h.items()
                h = {ntype: layer(block, rows)}
            else:
                h = layer(blocks, h)
    return h
