"""How benchmarks and tests train GraphSAGE in plain PyTorch, over blocks of gids' samplers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gids.bench.sage import GraphSage
from gids.sampler import Block


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
