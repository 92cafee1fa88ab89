"""The model that benchmarks and tests train: GraphSAGE in plain PyTorch, over blocks of gids' samplers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from gids.sampler import Block


def mean_of_sources(block: Block, x: torch.Tensor) -> torch.Tensor:
    """float32[num_dst, dim]: of each destination, the mean of its sources' rows x, each counted by its edge's
    weight; 0 without sources."""
    sources, destinations = block.coo()
    weights = x.new_ones(len(sources)) if block.weights is None else block.weights.to(x.dtype)
    summed = x.new_zeros((block.num_dst, x.shape[1])).index_add_(
        0, destinations, x[sources] * weights[:, None]
    )
    total = weights.new_zeros(block.num_dst).index_add_(0, destinations, weights).clamp(min=1e-6)
    return summed / total[:, None]


class SageLayer(torch.nn.Module):
    """GraphSAGE with the mean: W x + V mean(neighbors' x)."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = torch.nn.Linear(in_dim, out_dim)
        self.neighbors = torch.nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.own(x[: block.num_dst])
        return own + mean_of_sources(block, self.neighbors(x))


class GraphSage(torch.nn.Module):
    """dims: of the rows, of each hidden layer, and of the output."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(SageLayer(a, b) for a, b in pairwise(dims))

    def forward(self, blocks: Sequence[Block], x: torch.Tensor) -> torch.Tensor:
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x if depth == 0 else torch.relu(x))
        return x


class Training:
    """A model and its optimizer, Adam."""

    def __init__(
        self, dims: Sequence[int], *, seed: int, rate: float, device: torch.device | str = "cpu"
    ) -> None:
        torch.manual_seed(seed)
        self.model = GraphSage(dims).to(device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)

    def step(self, blocks: Sequence[Block], rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on a minibatch. Returns its loss, a scalar on the model's device."""
        return self.step_of_parts([(blocks, rows, labels)])

    def step_of_parts(
        self, parts: Sequence[tuple[Sequence[Block], torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Train on several minibatches at once, as data-parallel ranks do. Returns the mean loss of their
        seeds."""
        total = sum(len(labels) for _, _, labels in parts)
        self._optimizer.zero_grad()
        losses = []
        for blocks, rows, labels in parts:
            share = len(labels) / total
            loss = share * torch.nn.functional.cross_entropy(self.model(blocks, rows), labels)
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        return torch.stack(losses).sum()
