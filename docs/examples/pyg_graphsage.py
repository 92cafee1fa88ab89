"""Node classification with PyG's SAGEConv. The features stay on disk.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python docs/examples/pyg_graphsage.py papers.gids
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import SAGEConv

import gids
import gids.pyg


class GraphSAGE(nn.Module):
    def __init__(self, in_dim, hidden_dim, classes):
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(in_dim, hidden_dim), SAGEConv(hidden_dim, classes)])

    def forward(self, x, edge_index):
        x = self.layers[0](x, edge_index).relu()
        return self.layers[1](x, edge_index)


def scores_and_labels(model, batch):
    """Scores and labels of the seeds, which are the first nodes of a batch."""
    scores = model(batch.x, batch.edge_index)
    return scores[: batch.batch_size], batch.y[: batch.batch_size]


@torch.no_grad()
def accuracy(model, loader):
    right = total = 0
    for batch in loader:
        scores, labels = scores_and_labels(model, batch)
        right += (scores.argmax(1) == labels).sum().item()
        total += len(labels)
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
options = {"tables": {"x": table}, "batch_size": args.batch_size, "device": args.device}
train_loader = gids.pyg.NeighborLoader(source, [10, 10], "train", shuffle=True, **options)
val_loader = gids.pyg.NeighborLoader(source, [10, 10], "val", **options)

model = GraphSAGE(table.shape[0], 128, source.num_classes).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for batch in train_loader:
        loss = cross_entropy(*scores_and_labels(model, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {accuracy(model, val_loader):.1%}")
