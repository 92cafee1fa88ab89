"""A model learns from gids.pyg.NeighborLoader what it learns from the same data in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

import gids.pyg
from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.store import FeatureStore

EPOCHS = 6
WITHIN = 0.04  # of the in-memory accuracy, over 1000 test nodes


class Sage(nn.Module):
    """Computes layer i over the hops that it needs, by num_sampled_nodes and num_sampled_edges."""

    def __init__(self, in_dim: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(in_dim, 32), SAGEConv(32, classes)])

    def forward(self, batch: Data) -> torch.Tensor:
        x, edge_index = batch.x, batch.edge_index
        for depth, layer in enumerate(self.layers):
            hops = batch.num_sampled_nodes, batch.num_sampled_edges
            x, edge_index, _ = trim_to_layer(depth, *hops, x, edge_index)
            x = layer(x if depth == 0 else x.relu(), edge_index)
        return x[: batch.batch_size]


def accuracy_of(model: nn.Module, train: Iterable[Any], test: Iterable[Any]) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [model(batch).argmax(1) == batch.y[: batch.batch_size] for batch in test]
    return float(torch.cat(right).float().mean())


def test_graphsage_on_the_quickstart_graph(tmp_path: Path) -> None:
    spec = GraphSpec(4000, degree=12, dim=32, classes=8, train_count=2000, test_count=1000)
    write_graph(tmp_path / "g", spec)
    assert main(["convert", str(tmp_path / "g"), str(tmp_path / "g.gids"), "--quiet"]) == 0
    store = FeatureStore(tmp_path / "g.gids")
    graph, ([splits], [labels]) = store.graph(), (store.splits.values(), store.labels.values())
    destinations = torch.arange(4000).repeat_interleave(torch.from_numpy(np.diff(graph.indptr)))
    edges = torch.stack([torch.from_numpy(graph.indices.astype(np.int64)), destinations])
    data = Data(x=torch.from_numpy(np.load(tmp_path / "g" / "feat.npy")), edge_index=edges, y=labels)
    source, counts = gids.open(store, memory=1 << 28, tuning=gids.Tuning(cache=100_000)), [10, 5]
    sampler = gids.pyg.NeighborSampler(data, counts)
    accuracies = []
    for make in (
        lambda nodes, **options: gids.pyg.NeighborLoader(source, counts, nodes, **options),
        lambda nodes, **options: PygNodeLoader(data, sampler, nodes, **options),
    ):
        torch.manual_seed(0)
        train = make(splits["train"], batch_size=100, shuffle=True)
        accuracies.append(accuracy_of(Sage(32, 8), train, make(splits["test"], batch_size=100)))
    print("GraphSAGE: from the dataset, and in memory", accuracies)
    assert accuracies[0] > 0.7  # a row alone tells the class in half of the cases
    assert abs(accuracies[0] - accuracies[1]) < WITHIN
