"""What ranks do in the tests of training. In a module of its own: the processes of ranks import it."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from programs import mean_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gids.distributed

EXAMPLE = Path(__file__).parents[2] / "docs/examples/distributed_cooperative.py"


def train_together(dataset: Path, layers: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and weights of three epochs of docs/examples/distributed_cooperative.py."""
    train, losses = runpy.run_path(str(EXAMPLE))["train"], []

    def report(_epoch: int, loss: float, _accuracy: float) -> None:
        losses.append(loss)

    with gids.distributed.open(dataset, memory="64MB", timeout=30) as source:
        model = train(source, layers, epochs=3, batch_size=64, report=report)
    return losses, [p.detach() for p in model.parameters()]


class Mean(nn.Module):
    def __init__(self, in_dim: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * in_dim, 32), nn.Linear(64, classes)])

    def forward(self, minibatch: gids.Minibatch) -> torch.Tensor:
        h = minibatch.features["_N.feat"]
        for i, block in enumerate(minibatch.blocks):
            h = self.layers[i](torch.cat([h[: block.num_dst], mean_of(block, h)], 1))
            h = h.relu() if i == 0 else h
        return h


def accuracy_with_ddp(dataset: Path) -> float:
    """The accuracy after training with 64 seeds a step on all ranks together."""
    size = dist.get_world_size()
    with gids.distributed.open(dataset, memory="64MB", timeout=30) as source:
        torch.manual_seed(0)
        model = DistributedDataParallel(Mean(source.store.table("feat").shape[0], 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = gids.NodeLoader(source, source.split("train"), [5, 5], batch_size=64 // size, shuffle=True)
        for _ in range(4):
            for minibatch in loader:
                optimizer.zero_grad()
                cross_entropy(model(minibatch), minibatch.labels).backward()
                optimizer.step()
        right = torch.zeros(2)
        with torch.no_grad():
            for minibatch in gids.NodeLoader(source, source.split("test"), [5, 5], batch_size=64):
                found = model.module(minibatch).argmax(1) == minibatch.labels
                right += torch.tensor([found.sum(), len(found)])
        dist.all_reduce(right)
    return float(right[0] / right[1])
