"""Train GraphSAGE on samples, then compute its output from all neighbors, layer by layer.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python docs/examples/inference.py papers.gids

`gids.inference.layerwise` computes each node once per layer. What it keeps between two layers is on disk.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gids
from gids.inference import layerwise


class SAGELayer(nn.Module):
    """Each node's own row and the mean of its neighbors' rows, each times a matrix."""

    def __init__(self, in_dim, out_dim, activation):
        super().__init__()
        self.own = nn.Linear(in_dim, out_dim)
        self.neighbors = nn.Linear(in_dim, out_dim, bias=False)
        self.activation = activation

    def forward(self, block, x):
        src, dst = block.coo()
        total = x.new_zeros(block.num_dst, x.shape[1]).index_add_(0, dst, x[src])
        mean = total / block.indptr.diff().clamp(min=1)[:, None]
        return self.activation(self.own(x[: block.num_dst]) + self.neighbors(mean))


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--output", help="new dataset for the scores of all nodes (default: DATASET.scores)")
parser.add_argument("--memory", default="1GB", help="memory for loading, such as 16GB")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

source = gids.open(args.dataset, memory=args.memory)
table = source.table(args.table)
labels, val, test = source.labels["_N"], source.split("val"), source.split("test")
options = {"tables": [table]}
loader = gids.NodeLoader(source, "train", [10, 10], batch_size=args.batch_size, shuffle=True, **options)

layers = nn.ModuleList(
    [SAGELayer(table.shape[0], 128, nn.ReLU()), SAGELayer(128, source.num_classes, nn.Identity())]
)
optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

for epoch in range(args.epochs):
    layers.train()
    losses = []
    for minibatch in loader:
        x = minibatch.features[table.name]
        for layer, block in zip(layers, minibatch.blocks, strict=True):
            x = layer(block, x)
        loss = cross_entropy(x, minibatch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(loader)}", flush=True)

    layers.eval()  # some nodes: their scores are returned
    scores = layerwise(layers, source, nodes=val, **options).values
    accuracy = (scores.argmax(1) == labels[val]).float().mean()
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, validation accuracy {accuracy:.1%}")

# All nodes: their scores become a new dataset, to be opened beside the first one.
output = args.output or f"{args.dataset}.scores"
print(f"scores of all nodes to {output}", flush=True)
layerwise(layers, source, output=output, key="scores", **options)
both = gids.open([args.dataset, output], memory=args.memory)  # its loaders return features and scores
scores = both.table("scores").read_rows(test)
accuracy = (scores.argmax(1) == labels[test]).float().mean()
print(f"test accuracy {accuracy:.1%}")
