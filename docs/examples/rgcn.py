"""Node classification with R-GCN in PyG, over several node and edge types. The features stay on disk.

Make a dataset of papers and authors (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000 --hetero
    python docs/examples/rgcn.py papers.gids --type paper
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import SAGEConv

import gids
import gids.pyg


class RGCNLayer(nn.Module):
    """Each node's own row and, for each edge type, the mean of its neighbors' rows, each times a matrix."""

    def __init__(self, in_dims, out_dim, edge_types):
        super().__init__()
        self.own = nn.ModuleDict({f"to {ntype}": nn.Linear(dim, out_dim) for ntype, dim in in_dims.items()})
        self.neighbors = nn.ModuleDict()
        for src, name, dst in edge_types:
            conv = SAGEConv((in_dims[src], in_dims[dst]), out_dim, root_weight=False)
            self.neighbors[f"{src} {name} {dst}"] = conv

    def forward(self, x, edge_index):
        out = {ntype: self.own[f"to {ntype}"](rows) for ntype, rows in x.items()}
        for (src, name, dst), edges in edge_index.items():
            out[dst] = out[dst] + self.neighbors[f"{src} {name} {dst}"]((x[src], x[dst]), edges)
        return out


class RGCN(nn.Module):
    def __init__(self, in_dims, hidden_dim, classes, edge_types):
        super().__init__()
        hidden_dims = dict.fromkeys(in_dims, hidden_dim)
        self.first = RGCNLayer(in_dims, hidden_dim, edge_types)
        self.second = RGCNLayer(hidden_dims, classes, edge_types)

    def forward(self, x, edge_index):
        hidden = {ntype: rows.relu() for ntype, rows in self.first(x, edge_index).items()}
        return self.second(hidden, edge_index)


def scores_and_labels(model, batch, ntype):
    """Scores and labels of the seeds, which are the first nodes of their type."""
    scores = model(batch.collect(key), batch.edge_index_dict)[ntype]
    return scores[: batch[ntype].batch_size], batch[ntype].y[: batch[ntype].batch_size]


@torch.no_grad()
def accuracy(model, loader, ntype):
    right = total = 0
    for batch in loader:
        scores, labels = scores_and_labels(model, batch, ntype)
        right += (scores.argmax(1) == labels).sum().item()
        total += len(labels)
    return right / total


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--type", default="paper", help="the node type to classify")
parser.add_argument("--table", help="key of the node features, such as feat (default: the only key)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--memory", default="1GB", help="memory of the loaders, such as 16GB")
parser.add_argument("--device", default="cpu", help="cpu or cuda")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

source = gids.open(args.dataset, memory=args.memory)
tables = [
    table for table in source.tables.values() if table.kind == "node" and args.table in (None, table.key)
]
key = "x" if tables[0].key == "feat" else tables[0].key  # as gids.pyg calls it
options = {"tables": tables, "batch_size": args.batch_size, "device": args.device}
train_loader = gids.pyg.NeighborLoader(source, [10, 10], (args.type, "train"), shuffle=True, **options)
val_loader = gids.pyg.NeighborLoader(source, [10, 10], (args.type, "val"), **options)

in_dims = {table.type: table.shape[0] for table in tables}
classes = int(source.labels[args.type].max()) + 1
model = RGCN(in_dims, 128, classes, source.edge_types).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for batch in train_loader:
        loss = cross_entropy(*scores_and_labels(model, batch, args.type))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    val_accuracy = accuracy(model, val_loader, args.type)
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {val_accuracy:.1%}")
