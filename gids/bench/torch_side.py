"""A side of a comparison with torch alone, in its own process. gids samples the minibatches of both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

import gids
from gids.bench.sage import GraphSage
from gids.bench.sides import EpochConfig
from gids.bench.training import Side
from gids.sampler import Minibatch

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
