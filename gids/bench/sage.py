"""GraphSAGE in plain PyTorch, over blocks of gids' samplers or of another framework.

Called by the sides of a comparison, bench/ and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gids.sampler import Block

Mean = Callable[[Any, Tensor], Tensor]
"""float32[num_dst, dim]: of each destination of a block, the mean of its sources' rows."""


def mean_of_sources(block: Block, x: Tensor) -> Tensor:
    """float32[num_dst, dim]: of each destination, the mean of its sources' rows x, each counted by its edge's
    weight; 0 without sources."""
    sources, destinations = block.coo()
    weights = x.new_ones(len(sources)) if block.weights is None else block.weights.to(x.dtype)
    summed = x.new_zeros((block.num_dst, x.shape[1])).index_add_(
        0, destinations, x[sources] * weights[:, None]
    )
    total = weights.new_zeros(block.num_dst).index_add_(0, destinations, weights).clamp(min=1e-6)
    return summed / total[:, None]


class SageLayer(nn.Module):
    """W x + V mean(neighbors' x). Unlike SAGEConv it does not copy x."""

    def __init__(self, in_dim: int, out_dim: int, mean: Mean) -> None:
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)
        self._mean = mean

    def forward(self, block: Any, x: Tensor) -> Tensor:
        mean = self._mean(block, self.neighbors(x))
        own: Tensor = self.own(x[: len(mean)])
        return own + mean


class GraphSage(nn.Module):
    """dims: of the rows, of each hidden layer, and of the output."""

    def __init__(self, dims: Sequence[int], mean: Mean = mean_of_sources) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SageLayer(a, b, mean) for a, b in pairwise(dims))

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        """Logits of the seeds. x: the rows of the input nodes."""
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x if depth == 0 else torch.relu(x))
        return x
