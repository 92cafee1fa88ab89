"""Link prediction with GraphSAGE in plain PyTorch. The features stay on disk.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 3000
    python docs/examples/link_prediction.py papers.gids
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gids


class SAGELayer(nn.Module):
    """Each node's own row and the mean of its neighbors' rows, each times a matrix."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, block, x):
        src, dst = block.coo()
        total = x.new_zeros(block.num_dst, x.shape[1]).index_add_(0, dst, x[src])
        mean = total / block.indptr.diff().clamp(min=1)[:, None]
        return self.own(x[: block.num_dst]) + self.neighbors(mean)


class GraphSAGE(nn.Module):
    def __init__(self, in_dim, hidden_dim, classes):
        super().__init__()
        self.layers = nn.ModuleList([SAGELayer(in_dim, hidden_dim), SAGELayer(hidden_dim, classes)])

    def forward(self, blocks, x):
        x = self.layers[0](blocks[0], x).relu()
        return self.layers[1](blocks[1], x)


def scores(model, minibatch):
    """The dot product of the two ends of each seed edge, then of each negative."""
    h = model(minibatch.blocks, minibatch.features[table.name])  # rows of minibatch.seeds
    src, dst = minibatch.pairs
    return (h[src] * h[dst]).sum(1)


@torch.no_grad()
def accuracy(model, loader):
    """The share of edges that score higher than their negatives: 50 % by chance."""
    right = total = 0
    for minibatch in loader:
        edges, negatives = scores(model, minibatch).chunk(2)
        right += (edges > negatives).sum().item()
        total += len(edges)
    return right / total


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--memory", default="1GB", help="memory of the loaders, such as 16GB")
parser.add_argument("--device", default="cpu", help="cpu or cuda")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

source = gids.open(args.dataset, memory=args.memory)
table = source.table(args.table)
graph = source.store.graph()
destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
edges = torch.from_numpy(np.stack([graph.indices, destinations]))
edges = edges[:, torch.randperm(graph.num_edges)]
val_count = graph.num_edges // 20  # the other edges are for training
options = {
    "tables": [table],
    "negatives": 1,
    "exclude": "self",  # the blocks must not have the edges that the model is asked about
    "batch_size": args.batch_size,
    "device": args.device,
}
train_loader = gids.EdgeLoader(source, edges[:, val_count:], [10, 10], shuffle=True, **options)
val_loader = gids.EdgeLoader(source, edges[:, :val_count], [10, 10], **options)

model = GraphSAGE(table.shape[0], 128, 64).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for minibatch in train_loader:
        loss = binary_cross_entropy_with_logits(scores(model, minibatch), minibatch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {accuracy(model, val_loader):.1%}")
