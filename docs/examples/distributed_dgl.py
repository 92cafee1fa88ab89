"""Data-parallel training with DGL's SAGEConv: each process trains on its part of the seeds.

Make a dataset (or convert your own, see docs/datasets.md), then train:

    gids generate papers.gids --nodes 50000
    python -m torch.distributed.run --nproc-per-node 2 docs/examples/distributed_dgl.py papers.gids
"""

import argparse

import gids.dgl  # isort: skip  # before anything that imports dgl
import torch
import torch.distributed as dist
from dgl.dataloading import NeighborSampler
from dgl.nn import SAGEConv
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


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
    right_and_total = torch.zeros(2)
    for _, _, blocks in loader:  # each process has its own part
        scores, labels = model(blocks, blocks[0].srcdata[table.key]), blocks[-1].dstdata["label"]
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

source = gids.open(args.dataset, memory=args.memory)
table = source.table(args.table)
graph = gids.dgl.graph(source)
sampler = NeighborSampler([10, 10], prefetch_node_feats=[table.key], prefetch_labels=["label"])
options = {"gids": source, "batch_size": args.batch_size, "use_ddp": True}  # the processes share the seeds
train_loader = gids.dgl.DataLoader(graph, source.split("train"), sampler, shuffle=True, **options)
val_loader = gids.dgl.DataLoader(graph, source.split("val"), sampler, **options)

model = DistributedDataParallel(GraphSAGE(table.shape[0], 128, source.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

for epoch in range(args.epochs):
    losses = []
    for _, _, blocks in train_loader:
        scores = model(blocks, blocks[0].srcdata[table.key])
        loss = cross_entropy(scores, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the processes
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss, val_accuracy = sum(losses) / len(losses), accuracy(model, val_loader)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {val_accuracy:.1%}")

dist.destroy_process_group()
