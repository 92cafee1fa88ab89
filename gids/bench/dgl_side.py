"""A side of a comparison with DGL, in its own process. bench/rgcn_side.py trains on several node types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch

import gids.dgl  # isort: skip  # before dgl: makes it importable beside a current torch
import dgl
from torch import Tensor, nn

from gids.bench.sage import GraphSage
from gids.bench.sides import EpochConfig
from gids.bench.training import Side
from gids.store import FeatureStore
from gids.store.names import Relation

STOCK = "DGL's DataLoader over a memory-mapped tensor in g.ndata"


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Train as an EpochConfig says; the fields of its EpochResult. Called by run_fresh."""
    return asdict(DglSide(EpochConfig(**values)).train())


class DglSide(Side):
    """Minibatches are (input nodes, output nodes, blocks)."""

    @cached_property
    def graph(self) -> Any:
        """The DGL graph in memory, with labels. Loaded before the measurement."""
        graph = load_graph(self.store)
        graph.nodes[self.target].data["label"] = self.all_labels
        return graph

    def make_model(self, classes: int) -> nn.Module:
        hidden = [self.config.hidden] * (len(self.config.fanouts) - 1)
        return GraphSage([*self.tables[0].shape, *hidden, classes], dgl.ops.copy_u_mean)

    def seeds(self, ids: Tensor) -> Any:
        """Seeds as DGL takes them."""
        return ids

    def make_sampler(self, **prefetched: Any) -> Any:
        return dgl.dataloading.NeighborSampler(
            list(self.config.fanouts), prefetch_labels=["label"], **prefetched
        )

    def sample(self, seeds: Tensor) -> Any:
        return self._loader(dgl.dataloading.DataLoader, self.make_sampler(), seeds)

    def gids_loader(self, source: gids.Source) -> Any:
        return self._loader(gids.dgl.DataLoader, self._fetching(), self.train_ids, gids=source)

    def stock_loader(self, features: list[Tensor]) -> Any:
        for table, rows in zip(self.tables, features, strict=True):
            self.graph.nodes[table.type].data[table.key] = rows
        return self._loader(dgl.dataloading.DataLoader, self._fetching(), self.train_ids)

    def input_nodes(self, minibatch: Any) -> list[Tensor]:
        return [minibatch[2][0].srcdata[dgl.NID]]

    def features(self, minibatch: Any) -> list[Tensor]:
        return [minibatch[2][0].srcdata[self.tables[0].key]]

    def labels(self, minibatch: Any) -> Tensor:
        labels: Tensor = minibatch[2][-1].dstnodes[self.target].data["label"]
        return labels

    def logits(self, model: nn.Module, minibatch: Any, x: list[Tensor]) -> Tensor:
        logits: Tensor = model(minibatch[2], x[0])
        return logits

    def stats(self, loader: Any) -> dict[str, Any]:
        return super().stats(loader.feature_loader)

    def _fetching(self) -> Any:
        return self.make_sampler(prefetch_node_feats=[self.tables[0].key])

    def _loader(self, kind: Any, sampler: Any, seeds: Tensor, **options: Any) -> Any:
        dgl.seed(self.config.seed)
        return kind(self.graph, self.seeds(seeds), sampler, batch_size=self.config.batch_size, **options)


def load_graph(store: FeatureStore) -> Any:
    """The DGL graph, in memory."""
    edges: dict[Relation, tuple[str, Any]] = {}
    for relation in store.relations:
        graph = store.graph(relation)
        # DGL takes one type for all.
        indptr, indices = (torch.from_numpy(a.astype(np.int64)) for a in (graph.indptr, graph.indices))
        edges[relation] = ("csc", (indptr, indices, []))
    counts = {ntype: store.num_nodes(ntype) for ntype in store.node_types}
    return dgl.heterograph(edges, counts).formats("csc")
