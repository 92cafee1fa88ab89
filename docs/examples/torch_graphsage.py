"""Node classification with GraphSAGE in plain PyTorch. The features stay on disk.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python docs/examples/torch_graphsage.py papers.gids
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

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


@torch.no_grad()
def accuracy(model, loader):
    right = total = 0
    for minibatch in loader:
        scores = model(minibatch.blocks, minibatch.features[table.name])
        right += (scores.argmax(1) == minibatch.labels).sum().item()
        total += len(minibatch.labels)
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
options = {"tables": [table], "batch_size": args.batch_size, "device": args.device}
train_loader = gids.NodeLoader(source, "train", [10, 10], shuffle=True, **options)
val_loader = gids.NodeLoader(source, "val", [10, 10], **options)

model = GraphSAGE(table.shape[0], 128, source.num_classes).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for minibatch in train_loader:
        scores = model(minibatch.blocks, minibatch.features[table.name])
        loss = cross_entropy(scores, minibatch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {accuracy(model, val_loader):.1%}")
