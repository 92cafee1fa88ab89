"""Data-parallel training with PyG's SAGEConv. The processes divide the seeds and the reading of features.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python -m torch.distributed.run --nproc-per-node 2 docs/examples/distributed_pyg.py papers.gids
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import SAGEConv

import gids.distributed
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
    right_and_total = torch.zeros(2)
    for batch in loader:  # this process's part
        scores, labels = scores_and_labels(model, batch)
        right_and_total += torch.tensor([(scores.argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(right_and_total)
    return (right_and_total[0] / right_and_total[1]).item()


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=512, help="seeds of each process")
parser.add_argument("--memory", default="500MB", help="memory of the loaders of a process, such as 16GB")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

dist.init_process_group("gloo")

source = gids.distributed.open(args.dataset, memory=args.memory)
table = source.table(args.table)
options = {"tables": {"x": table}, "batch_size": args.batch_size}
train_loader = gids.pyg.NeighborLoader(source, [10, 10], "train", shuffle=True, **options)
val_loader = gids.pyg.NeighborLoader(source, [10, 10], "val", **options)

model = DistributedDataParallel(GraphSAGE(table.shape[0], 128, source.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for batch in train_loader:
        loss = cross_entropy(*scores_and_labels(model, batch))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the processes
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss, val_accuracy = sum(losses) / len(losses), accuracy(model, val_loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {val_accuracy:.1%}")

source.close()
dist.destroy_process_group()
