"""The model that benchmarks train: GraphSAGE in plain PyTorch, over the blocks of gids' samplers."""

from __future__ import annotations

from itertools import pairwise

import torch

from gids.sampler import Block


class SageLayer(torch.nn.Module):
    """GraphSAGE with the mean: W x + V mean(neighbors' x), each neighbor counted by its edge's weight."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = torch.nn.Linear(in_dim, out_dim)
        self.neighbors = torch.nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        sources, destinations = block.coo()
        weights = x.new_ones(len(sources)) if block.weights is None else block.weights.to(x.dtype)
        messages = self.neighbors(x)[sources] * weights[:, None]
        summed = messages.new_zeros((block.num_dst, messages.shape[1])).index_add_(0, destinations, messages)
        total = weights.new_zeros(block.num_dst).index_add_(0, destinations, weights).clamp(min=1e-6)
        own: torch.Tensor = self.own(x[: block.num_dst])
        return own + summed / total[:, None]


class GraphSage(torch.nn.Module):
    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(SageLayer(a, b) for a, b in pairwise(dims))

    def forward(self, blocks: list[Block], x: torch.Tensor) -> torch.Tensor:
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x if depth == 0 else torch.relu(x))
        return x
