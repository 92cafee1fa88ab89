"""Node classification with DGL's SAGEConv. The features stay on disk.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python docs/examples/dgl_graphsage.py papers.gids
"""

import argparse

import gids.dgl  # isort: skip  # before anything that imports dgl
import torch
from dgl.dataloading import NeighborSampler
from dgl.nn import SAGEConv
from torch import nn
from torch.nn.functional import cross_entropy


class GraphSAGE(nn.Module):
    def __init__(self, in_dim, hidden_dim, classes):
        super().__init__()
        self.layers = nn.ModuleList(
            [SAGEConv(in_dim, hidden_dim, "mean"), SAGEConv(hidden_dim, classes, "mean")]
        )

    def forward(self, blocks, x):
        x = self.layers[0](blocks[0], x).relu()
        return self.layers[1](blocks[1], x)


@torch.no_grad()
def accuracy(model, loader):
    right = total = 0
    for _, _, blocks in loader:
        scores, labels = model(blocks, blocks[0].srcdata[table.key]), blocks[-1].dstdata["label"]
        right += (scores.argmax(1) == labels).sum().item()
        total += len(labels)
    return right / total


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--memory", default="1GB", help="memory of the loaders, such as 16GB")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

source = gids.open(args.dataset, memory=args.memory)
table = source.table(args.table)
graph = gids.dgl.graph(source)
sampler = NeighborSampler([10, 10], prefetch_node_feats=[table.key], prefetch_labels=["label"])
options = {"gids": source, "batch_size": args.batch_size}
train_loader = gids.dgl.DataLoader(graph, source.split("train"), sampler, shuffle=True, **options)
val_loader = gids.dgl.DataLoader(graph, source.split("val"), sampler, **options)

model = GraphSAGE(table.shape[0], 128, source.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for _, _, blocks in train_loader:
        scores = model(blocks, blocks[0].srcdata[table.key])
        loss = cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {accuracy(model, val_loader):.1%}")
