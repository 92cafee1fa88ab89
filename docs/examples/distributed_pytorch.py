r"""Data-parallel training of GraphSAGE on a partitioned dataset. Each process has a part on its disk.

Make a dataset (or convert your own, see docs/datasets.md), divide it, then start a process for each part:

    gids generate papers.gids --nodes 50000
    gids partition papers.gids papers.parts --parts 2
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun of torch 2.13 cannot restart processes without
    python -m torch.distributed.run --nproc-per-node 2 --max-restarts 3 \
        docs/examples/distributed_pytorch.py papers.parts --checkpoint papers.pt

If a process ends, torchrun starts all of them again, and they go on with the checkpoint.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gids.distributed


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
    right_and_total = torch.zeros(2)
    for minibatch in loader:  # each process has its own part
        scores = model(minibatch.blocks, minibatch.features[table.name])
        right_and_total += torch.tensor([(scores.argmax(1) == minibatch.labels).sum(), len(minibatch.labels)])
    dist.all_reduce(right_and_total)
    return (right_and_total[0] / right_and_total[1]).item()


def save(path, **states):
    """Rank 0 writes. A process that is killed meanwhile leaves the checkpoint before."""
    if dist.get_rank() == 0:
        torch.save({name: state.state_dict() for name, state in states.items()}, f"{path}.new")
        os.replace(f"{path}.new", path)


parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="the directory of the parts, or a dataset that all processes can read")
parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=512, help="seeds of each process")
parser.add_argument("--memory", default="500MB", help="memory of the loaders of a process, such as 16GB")
parser.add_argument("--checkpoint", help="file to go on with, if it exists, and to write")
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

dist.init_process_group("gloo")

source = gids.distributed.open(args.dataset, memory=args.memory)
table = source.table(args.table)
options = {"tables": [table], "batch_size": args.batch_size}
train_loader = gids.NodeLoader(source, "train", [10, 10], shuffle=True, **options)
val_loader = gids.NodeLoader(source, "val", [10, 10], **options)

torch.manual_seed(0)
model = DistributedDataParallel(GraphSAGE(table.shape[0], 128, source.num_classes))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
saved = {"model": model, "optimizer": optimizer, "loader": train_loader}
if args.checkpoint and os.path.exists(args.checkpoint):
    for name, state in torch.load(args.checkpoint).items():
        saved[name].load_state_dict(state)

while train_loader.epoch < args.epochs:
    epoch = train_loader.epoch
    losses = []
    for minibatch in train_loader:  # after a restart, from the step of the checkpoint
        scores = model(minibatch.blocks, minibatch.features[table.name])
        loss = cross_entropy(scores, minibatch.labels)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the processes
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)}", flush=True)
        if args.checkpoint and len(losses) % args.every == 0:
            save(args.checkpoint, **saved)
    val_accuracy = accuracy(model, val_loader)
    if args.checkpoint:
        save(args.checkpoint, **saved)
    if dist.get_rank() == 0 and losses:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, validation accuracy {val_accuracy:.1%}")

source.close()
dist.destroy_process_group()
