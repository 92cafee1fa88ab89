"""A side of a comparison with PyG, in its own process.

Without pyg-lib and torch-sparse PyG's NeighborLoader cannot sample. Stock is then PyG's NodeLoader, which
takes any sampler, with that of gids: PyG's loader, its worker processes and its fetching of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import gids.pyg  # isort: skip  # before PyG: says how to install it
import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric import typing as installed
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from gids.bench.sides import EpochConfig
from gids.bench.training import Side
from gids.pyg.hops import HopSampler
from gids.sampler import Topology
from gids.store import FeatureStore

SAMPLED_BY = "pyg-lib" if installed.WITH_PYG_LIB else "torch-sparse" if installed.WITH_TORCH_SPARSE else ""
"""What samples for PyG's own NeighborLoader; "" if nothing is installed that can."""
STOCK = (
    f"PyG's NeighborLoader (sampler: {SAMPLED_BY}) over Data with a memory-mapped x"
    if SAMPLED_BY
    else "PyG's NodeLoader over Data with a memory-mapped x. gids samples the same minibatches for it: PyG's "
    "NeighborLoader needs pyg-lib or torch-sparse, and neither is installed"
)


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return asdict(PygSide(EpochConfig(**values)).train())


class PygSide(Side):
    """Minibatches are Data."""

    @cached_property
    def edge_index(self) -> Tensor:
        """The edges in memory, if PyG samples. Loaded before the measurement."""
        if not SAMPLED_BY:
            return torch.empty((2, 0), dtype=torch.int64)
        graph = self.store.graph()
        sources, indptr = (torch.from_numpy(a.astype(np.int64)) for a in (graph.indices, graph.indptr))
        return torch.stack([sources, torch.arange(graph.num_dst).repeat_interleave(indptr.diff())])

    @property
    def fanouts(self) -> list[int]:
        return list(reversed(self.config.fanouts))  # PyG begins with the seeds

    def make_model(self, classes: int) -> nn.Module:
        model: nn.Module = GraphSAGE(
            *self.tables[0].shape, self.config.hidden, len(self.fanouts), out_channels=classes
        )
        return model

    def sample(self, seeds: Tensor) -> Any:
        return self._stock_loader(seeds, num_nodes=len(self.all_labels))

    def gids_loader(self, source: gids.Source) -> Any:
        config = self.config
        options: dict[str, Any] = {"batch_size": config.batch_size, "seed": config.seed}
        tables = {"x": self.tables[0].name}
        return gids.pyg.NeighborLoader(source, self.fanouts, self.train_ids, tables=tables, **options)

    def stock_loader(self, features: list[Tensor]) -> Any:
        workers = self.config.source.get("num_workers", 0)
        return self._stock_loader(self.train_ids, workers, x=features[0])

    def input_nodes(self, minibatch: Data) -> list[Tensor]:
        return [minibatch.n_id]

    def features(self, minibatch: Data) -> list[Tensor]:
        return [minibatch.x]

    def labels(self, minibatch: Data) -> Tensor:
        labels: Tensor = minibatch.y[: minibatch.batch_size]
        return labels.long().flatten()

    def logits(self, model: nn.Module, minibatch: Data, x: list[Tensor]) -> Tensor:
        logits: Tensor = model(x[0], minibatch.edge_index)
        return logits[: minibatch.batch_size]

    def _stock_loader(self, seeds: Tensor, workers: int = 0, **attributes: Any) -> Any:
        config = self.config
        data = Data(y=self.all_labels, edge_index=self.edge_index, **attributes)
        options = {"input_nodes": seeds, "batch_size": config.batch_size, "num_workers": workers}
        if SAMPLED_BY:
            return NeighborLoader(data, self.fanouts, is_sorted=True, **options)
        sampler = NativeSampler(self.store, self.fanouts, config.batch_size, config.seed, workers)
        return NodeLoader(data, sampler, **options)


class NativeSampler(BaseSampler):  # type: ignore[misc]  # PyG is not typed
    """The sampler of gids for PyG's NodeLoader. It draws what gids.pyg.NeighborLoader does with this seed.

    workers: number of worker processes, each of which samples with one thread, as PyG's samplers do there.
    """

    def __init__(
        self, store: FeatureStore, num_neighbors: list[int], batch_size: int, seed: int, workers: int
    ) -> None:
        self._store, self._batch_size, self._seed = store, batch_size, seed
        self._sampler = HopSampler(num_neighbors, threads=1 if workers else None)

    @cached_property
    def _topology(self) -> Topology:  # in the process that samples
        return Topology(self._store.graph())

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        step = int(index.input_id[0]) // self._batch_size
        drawn = self._sampler.sample(self._topology, index.node, seed=self._seed, step=step)
        [edges] = drawn.edges.values()
        row, col = edges.index
        return SamplerOutput(drawn.input_nodes, row, col, None, metadata=(index.input_id, index.time))

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        raise NotImplementedError
