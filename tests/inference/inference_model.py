"""Layers in plain torch; the reference over a whole graph in memory; and graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch

from gids.store.names import Relation

Rows = dict[str, torch.Tensor]
MEMORY = 20 << 20
COUNTS = {"paper": 1500, "author": 400, "field": 40, "nobody": 0}
RELATIONS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("field", "has", "paper"),
    ("paper", "written by", "author"),
    ("nobody", "reads", "author"),
]


def uneven_in_edges(num_src: int, num_dst: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """With parallel edges, isolated nodes, and one hub."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 12, num_dst) if num_src else np.zeros(num_dst, np.int64)
    degrees[:30] = 0
    if num_src:
        degrees[40] = 300
    return datasets.in_edges(degrees, num_src, rng)


def mean_of_edges(block: Any, rows: torch.Tensor) -> torch.Tensor:
    """rows: of each edge."""
    _, dst = block.coo()
    total = torch.zeros(block.num_dst, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    total.index_add_(0, dst, rows)
    return total / block.indptr.diff().clamp(min=1).view(-1, *[1] * (rows.dim() - 1))


def mean_of_sources(block: Any, rows: torch.Tensor) -> torch.Tensor:
    return mean_of_edges(block, rows[block.coo()[0]])


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


class EdgeSage(Sage):
    """Scales the message of an edge by a function of the edge's row."""

    def __init__(self, in_dim: int, out_dim: int, edge_dim: int, seed: int) -> None:
        super().__init__(in_dim, out_dim, seed)
        generator = torch.Generator().manual_seed(seed + 100)
        self.of_edge = torch.nn.Parameter(torch.randn(edge_dim, out_dim, generator=generator))

    def forward(self, block: Any, h: torch.Tensor, edge_rows: torch.Tensor) -> torch.Tensor:
        along = (h @ self.other)[block.coo()[0]] * torch.sigmoid(edge_rows.to(h.dtype) @ self.of_edge)
        return torch.relu(h[: block.num_dst] @ self.own + mean_of_edges(block, along))


class HeteroSage(torch.nn.Module):
    """Sums over the relations from types with rows. Types without such a relation have no output."""

    def __init__(self, dims: dict[str, int], relations: list[Relation], out_dim: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            r: torch.randn(dims[r[0]], out_dim, generator=generator) / dims[r[0]] ** 0.5
            for r in relations
            if r[0] in dims
        }

    def forward(
        self,
        blocks: dict[Relation, Any],
        h: dict[str, torch.Tensor],
        edge_rows: dict[Relation, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """edge_rows: of one number for each edge, by which what comes along it is multiplied."""
        found: dict[str, torch.Tensor] = {}
        for relation, weight in self.weights.items():
            if relation[0] in h:
                along = (h[relation[0]] @ weight)[blocks[relation].coo()[0]]
                if edge_rows and relation in edge_rows:
                    along = along * edge_rows[relation].to(along.dtype)
                part = mean_of_edges(blocks[relation], along)
                found[relation[2]] = found[relation[2]] + part if relation[2] in found else part
        return {ntype: torch.relu(rows) for ntype, rows in found.items()}


def in_memory(
    model: list[Any],
    graphs: dict[Relation, Any],
    features: dict[str, torch.Tensor],
    edge_features: dict[Relation, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """All layers over the whole graph. graphs: gids Graphs by relation. edge_features: by edge id."""

    def whole(graph: Any) -> Any:
        indptr = torch.from_numpy(np.array(graph.indptr))
        dst = torch.arange(graph.num_dst).repeat_interleave(indptr.diff())
        src = torch.from_numpy(np.array(graph.indices, np.int64))
        return SimpleNamespace(num_dst=graph.num_dst, indptr=indptr, coo=lambda: (src, dst))

    blocks = {relation: whole(graph) for relation, graph in graphs.items()}
    by_relation = {
        relation: rows
        if (ids := graphs[relation].edge_ids) is None
        else rows[torch.from_numpy(np.array(ids))]
        for relation, rows in (edge_features or {}).items()
    }
    h = features
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, Sage):
                [block], [(ntype, rows)] = blocks.values(), h.items()
                h = {ntype: layer(block, rows, *by_relation.values())}
            else:
                h = layer(blocks, h, by_relation)
    return h


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_memory(layers: list[dict[str, Any]], memory_bytes: int) -> None:
    for layer in layers:
        memory = layer["loader"]["memory"]
        assert sum(memory.values()) <= memory_bytes, memory
