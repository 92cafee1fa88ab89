"""Models learn from gids.pyg.NeighborLoader what they learn from the same data in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyg_model import CITES, WRITES, WRITTEN, write
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.nn import GraphConv, HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

import gids.pyg
from gids.cli import main
from gids.convert.synthetic import GraphSpec, write_graph
from gids.store import FeatureStore

EPOCHS = 6
WITHIN = 0.04  # of the in-memory accuracy, over some 1000 test nodes


class Sage(nn.Module):
    """Computes layer i over the hops that it needs, by num_sampled_nodes and num_sampled_edges."""

    def __init__(self, in_dim: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(in_dim, 32), SAGEConv(32, classes)])

    def forward(self, batch: Data) -> torch.Tensor:
        x, edge_index = batch.x, batch.edge_index
        for depth, layer in enumerate(self.layers):
            x, edge_index, _ = trim_to_layer(
                depth, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
            )
            x = layer(x if depth == 0 else x.relu(), edge_index)
        return x[: batch.batch_size]


class RelationalGcn(nn.Module):
    """Schlichtkrull et al.: a weight for each relation, the mean over its neighbors, one for the node."""

    def __init__(self, dims: dict[str, int], classes: int) -> None:
        super().__init__()
        relations = (CITES, WRITES, WRITTEN)

        def layer(of: dict[str, int], to: int) -> HeteroConv:
            return HeteroConv({r: GraphConv((of[r[0]], of[r[2]]), to, aggr="mean") for r in relations})

        self.layers = nn.ModuleList([layer(dims, 32), layer(dict.fromkeys(dims, 32), classes)])

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = batch.x_dict
        for depth, layer in enumerate(self.layers):
            x = layer({t: v if depth == 0 else v.relu() for t, v in x.items()}, batch.edge_index_dict)
        return x["paper"][: batch["paper"].batch_size]


def accuracy_of(model: nn.Module, train: Iterable[Any], test: Iterable[Any], seeds: Any) -> float:
    """seeds: the storage of a batch that has its seeds, by batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels_of(seeds(batch))).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [(model(batch).argmax(1) == labels_of(seeds(batch))) for batch in test]
    return float(torch.cat(right).float().mean())


def labels_of(storage: Any) -> torch.Tensor:
    return storage.y[: storage.batch_size]


def accuracies(
    make_model: Callable[[], nn.Module],
    data: Data | HeteroData,
    source: Any,
    counts: list[int],
    ids: tuple[torch.Tensor, torch.Tensor],
    batch_size: int,
) -> tuple[float, float]:
    """Of models trained from a dataset, and from the same data in memory. ids: to train and to test."""

    def seeds(batch: Any) -> Any:
        return batch["paper"] if isinstance(data, HeteroData) else batch

    nodes: Any = [("paper", part) if isinstance(data, HeteroData) else part for part in ids]
    torch.manual_seed(0)
    with (
        gids.pyg.NeighborLoader(source, counts, nodes[0], batch_size=batch_size, shuffle=True) as train,
        gids.pyg.NeighborLoader(source, counts, nodes[1], batch_size=batch_size) as test,
    ):
        from_disk = accuracy_of(make_model(), train, test, seeds)
    sampler = gids.pyg.NeighborSampler(data, counts)
    torch.manual_seed(0)
    in_memory = accuracy_of(
        make_model(),
        PygNodeLoader(data, sampler, nodes[0], batch_size=batch_size, shuffle=True),
        PygNodeLoader(data, sampler, nodes[1], batch_size=batch_size),
        seeds,
    )
    return from_disk, in_memory


def test_graphsage_on_the_quickstart_graph(tmp_path: Path) -> None:
    spec = GraphSpec(4000, degree=12, dim=32, classes=8, train_count=2000, test_count=1000)
    write_graph(tmp_path / "g", spec)
    assert main(["convert", str(tmp_path / "g"), str(tmp_path / "g.gids"), "--quiet"]) == 0
    store = FeatureStore(tmp_path / "g.gids")
    graph = store.graph()
    edges = torch.stack(
        [
            torch.from_numpy(graph.indices.astype(np.int64)),
            torch.arange(4000).repeat_interleave(torch.from_numpy(np.diff(graph.indptr))),
        ]
    )
    (splits,) = store.splits.values()
    (labels,) = store.labels.values()
    data = Data(x=torch.from_numpy(np.load(tmp_path / "g" / "feat.npy")), edge_index=edges, y=labels)

    source = gids.open(store, memory=1 << 28, tuning=gids.Tuning(cache=100_000))
    ids = splits["train"], splits["test"]
    from_disk, in_memory = accuracies(lambda: Sage(32, 8), data, source, [10, 5], ids, 100)
    print(f"GraphSAGE: {from_disk:.3f}, in memory {in_memory:.3f}")
    assert from_disk > 0.7  # a row alone tells the class in half of the cases
    assert abs(from_disk - in_memory) < WITHIN


def test_a_relational_gcn_on_several_types(tmp_path: Path) -> None:
    """Papers look alike; their class is that of their authors, whose features show it."""
    rng = np.random.default_rng(0)
    papers, authors, classes = 2000, 400, 5
    of_paper, of_author = rng.integers(0, classes, papers), rng.integers(0, classes, authors)
    written = np.stack([rng.integers(0, authors, papers * 8), np.repeat(np.arange(papers), 8)])
    alike = (of_author[written[0]] == of_paper[written[1]]) | (rng.random(papers * 8) < 0.05)
    written = torch.from_numpy(written[:, alike])
    data = HeteroData()
    data["paper"].x = torch.from_numpy(rng.standard_normal((papers, 8), dtype=np.float32))
    data["paper"].y = torch.from_numpy(of_paper)
    shown = np.where(rng.random(authors) < 0.8, of_author, rng.integers(0, classes, authors))
    data["author"].x = torch.from_numpy(
        rng.standard_normal((authors, 6), dtype=np.float32) + 3 * np.eye(6, dtype=np.float32)[shown]
    )
    data[CITES].edge_index = torch.from_numpy(rng.integers(0, papers, (2, papers * 3)))
    data[WRITES].edge_index = written
    data[WRITTEN].edge_index = written.flip(0)
    path = write(tmp_path / "h.gids", data)

    def make_model() -> nn.Module:
        return RelationalGcn({"paper": 8, "author": 6}, classes)

    order = torch.from_numpy(rng.permutation(papers))
    source = gids.open(path, memory=1 << 28, tuning=gids.Tuning(cache=50_000))
    from_disk, in_memory = accuracies(make_model, data, source, [6, 4], (order[:1000], order[1000:]), 50)
    print(f"relational GCN: {from_disk:.3f}, in memory {in_memory:.3f}")
    assert from_disk > 0.6  # without the relations 0.2
    assert abs(from_disk - in_memory) < WITHIN
