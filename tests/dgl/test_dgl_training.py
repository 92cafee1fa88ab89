"""From a file of features to a trained model: convert, load through the flag, train, compare with stock DGL.

The source is a random citation graph in the widespread .npz format of sparse `attr_*` and `adj_*` arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from dgl_model import seed_everything

import gids.dgl
from gids.cli import main
from gids.store import FeatureStore

import dgl  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt")  # stock DGL with workers


def random_citations(path: Path, nodes: int = 1200, words: int = 300) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, nodes)
    topic = rng.random((6, words)) < 0.1
    attr = scipy.sparse.csr_matrix(
        (rng.random((nodes, words)) < 0.02 + 0.2 * topic[labels]).astype(np.float32)
    )
    src = rng.integers(0, nodes, 6 * nodes)
    dst = rng.integers(0, nodes, 6 * nodes)
    alike = (labels[src] == labels[dst]) | (rng.random(len(src)) < 0.1)
    adj = scipy.sparse.csr_matrix(
        (np.ones(alike.sum(), np.float32), (src[alike], dst[alike])), (nodes, nodes)
    )
    parts = {
        f"{name}_{field}": getattr(m, field)
        for name, m in (("attr", attr), ("adj", adj))
        for field in ("data", "indices", "indptr", "shape")
    }
    np.savez(path, **parts, labels=labels)


@dataclass
class Citations:
    path: Path  # the dataset
    source: torch.Tensor  # the features, dense, straight from the source
    graph: Any  # without features
    full: Any  # with features, for stock DGL
    labels: torch.Tensor
    splits: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def citations(tmp_path_factory: pytest.TempPathFactory) -> Citations:
    directory = tmp_path_factory.mktemp("citations")
    source = directory / "random.npz"
    random_citations(source)
    path = directory / "c.gids"
    assert main(["convert", str(source), str(path), "--quiet"]) == 0
    arrays = np.load(source)
    csr = scipy.sparse.csr_matrix(
        tuple(arrays[f"attr_{f}"] for f in ("data", "indices", "indptr")), tuple(arrays["attr_shape"])
    )
    features = torch.from_numpy(csr.toarray().astype(np.float32))
    store = FeatureStore(path)
    graph = gids.dgl.graph(store)
    full = graph.clone()
    full.ndata["feat"] = features
    return Citations(path, features, graph, full, store.labels["_N"], store.splits["_N"])


def sampler() -> Any:
    return dgl.dataloading.NeighborSampler([4, 4], prefetch_node_feats=["feat"], prefetch_labels=["label"])


BATCH = 256


class Sage(torch.nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [dgl.nn.SAGEConv(dim, hidden, "mean"), dgl.nn.SAGEConv(hidden, classes, "mean")]
        )

    def forward(self, blocks: Any, h: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.layers[0](blocks[0], h))
        return self.layers[1](blocks[1], h)


def accuracy(graph: Any, citations: Citations, **options: Any) -> float:
    """Validation accuracy after a few epochs of training."""
    cls = gids.dgl.DataLoader if "gids" in options else dgl.dataloading.DataLoader
    seed_everything()
    model = Sage(citations.source.shape[1], 16, int(citations.labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train = cls(graph, citations.splits["train"], sampler(), batch_size=BATCH, shuffle=True, **options)
    valid = cls(graph, citations.splits["val"], sampler(), batch_size=BATCH, **options)
    for _ in range(8):
        for _, _, blocks in train:
            loss = torch.nn.functional.cross_entropy(
                model(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    right = 0
    with torch.no_grad():
        for _, _, blocks in valid:
            right += int(
                (model(blocks, blocks[0].srcdata["feat"]).argmax(1) == blocks[-1].dstdata["label"]).sum()
            )
    return right / len(citations.splits["val"])


def test_training_reaches_the_accuracy_of_stock_dgl(citations: Citations) -> None:
    ours = accuracy(
        citations.graph,
        citations,
        gids=gids.open(citations.path, memory=1 << 30, tuning=gids.Tuning(cache=1 << 22)),
    )
    assert ours == accuracy(citations.full, citations)
    assert ours > 0.55
