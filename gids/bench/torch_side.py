"""A side of a comparison with torch alone, in its own process. gids samples the minibatches of both sides.

bench/sage.py trains its model, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import gids
from gids.bench.sides import EpochConfig
from gids.bench.training import Side
from gids.sampler import Block, Minibatch

STOCK = "x[input_nodes] of a memory-mapped tensor. gids samples the same minibatches for it"


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return asdict(TorchSide(EpochConfig(**values)).train())


class TorchSide(Side):
    """Minibatches are those of gids.NodeLoader; stock fetches their rows in features()."""

    def make_model(self, classes: int) -> nn.Module:
        hidden = [self.config.hidden] * (len(self.config.fanouts) - 1)
        return GraphSage([*self.tables[0].shape, *hidden, classes])

    def sample(self, seeds: Tensor) -> Any:
        return self._loader(self.store, seeds, [])

    def gids_loader(self, source: gids.Source) -> Any:
        return self._loader(source, self.train_ids, [self.tables[0].name])

    def stock_loader(self, features: list[Tensor]) -> Any:
        [self.mapped] = features
        return self.sample(self.train_ids)

    def input_nodes(self, minibatch: Minibatch) -> list[Tensor]:
        assert isinstance(minibatch.input_nodes, Tensor)
        return [minibatch.input_nodes]

    def features(self, minibatch: Minibatch) -> list[Tensor]:
        if minibatch.features:
            return [minibatch.features[self.tables[0].name]]
        return [self.mapped[ids] for ids in self.input_nodes(minibatch)]

    def labels(self, minibatch: Minibatch) -> Tensor:
        assert isinstance(minibatch.labels, Tensor)
        return minibatch.labels.long().flatten()

    def logits(self, model: nn.Module, minibatch: Minibatch, x: list[Tensor]) -> Tensor:
        logits: Tensor = model(minibatch.blocks, x[0])
        return logits

    def _loader(self, source: Any, seeds: Tensor, tables: list[str]) -> Any:
        config = self.config
        options: dict[str, Any] = {"batch_size": config.batch_size, "tables": tables, "seed": config.seed}
        return gids.NodeLoader(source, seeds, list(config.fanouts), **options)


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
    """GraphSAGE with the mean: W x + V mean(neighbors' x)."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        own: Tensor = self.own(x[: block.num_dst])
        return own + mean_of_sources(block, self.neighbors(x))


class GraphSage(nn.Module):
    """dims: of the rows, of each hidden layer, and of the output."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in pairwise(dims))

    def forward(self, blocks: Sequence[Block], x: Tensor) -> Tensor:
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x if depth == 0 else torch.relu(x))
        return x
