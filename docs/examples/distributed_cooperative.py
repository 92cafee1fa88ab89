"""Several processes train GraphSAGE on one large minibatch together: each node is computed by one of them.

Make a dataset (or convert your own, see docs/datasets.md), then train. A directory of parts, which
`gids partition` makes, can take the place of the dataset.

    gids generate papers.gids --nodes 50000
    python -m torch.distributed.run --nproc-per-node 2 docs/examples/distributed_cooperative.py papers.gids

--layers dgl and --layers pyg compute with the SAGEConv of DGL and PyG.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gids.distributed


class TorchLayer(nn.Module):
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


class DGLLayer(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        import gids.dgl  # noqa: F401, I001  # before anything that imports dgl
        from dgl.nn import SAGEConv

        self.conv = SAGEConv(in_dim, out_dim, "mean")

    def forward(self, block, x):
        import dgl

        graph = dgl.create_block(block.coo(), block.num_src, block.num_dst)
        return self.conv(graph, (x, x[: block.num_dst]))


class PyGLayer(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.conv = SAGEConv(in_dim, out_dim)

    def forward(self, block, x):
        return self.conv((x, x[: block.num_dst]), torch.stack(block.coo()))


LAYERS = {"torch": TorchLayer, "dgl": DGLLayer, "pyg": PyGLayer}


class GraphSAGE(nn.Module):
    def __init__(self, layer, table, hidden_dim, classes):
        super().__init__()
        self.table, in_dim = table.name, table.shape[0]
        self.layers = nn.ModuleList([layer(in_dim, hidden_dim), layer(hidden_dim, classes)])

    def forward(self, minibatch):
        x = minibatch.features[self.table]  # rows of the input nodes that this process owns
        x = minibatch.exchange(0, x)  # and rows of the sources of its edges
        x = self.layers[0](minibatch.blocks[0], x).relu()
        x = minibatch.exchange(1, x)
        return self.layers[1](minibatch.blocks[1], x)


def train(source, layers, *, epochs, batch_size, table=None, report=lambda epoch, loss, accuracy: None):
    """The trained model. batch_size: seeds of all processes together. table: its name."""
    world_size = dist.get_world_size()
    table = source.table(table)
    options = {"tables": [table], "batch_size": batch_size // world_size, "cooperative": True}
    train_loader = gids.NodeLoader(source, "train", [10, 10], shuffle=True, **options)
    val_loader = gids.NodeLoader(source, "val", [10, 10], **options)
    torch.manual_seed(0)
    model = DistributedDataParallel(GraphSAGE(LAYERS[layers], table, 128, source.num_classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(epochs):
        losses = []
        for minibatch in train_loader:
            scores = model(minibatch)  # scores of the seeds that this process owns, perhaps none
            loss = cross_entropy(scores, minibatch.labels, reduction="sum") / minibatch.seed_count
            optimizer.zero_grad()
            (loss * world_size).backward()  # DDP divides by the number of processes
            optimizer.step()
            losses.append(loss.detach())
            if dist.get_rank() == 0 and len(losses) % 20 == 1:
                print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        right_and_total = torch.zeros(2)
        with torch.no_grad():
            for minibatch in val_loader:
                right = (model.module(minibatch).argmax(1) == minibatch.labels).sum()
                right_and_total += torch.tensor([right, len(minibatch.labels)])
        dist.all_reduce(right_and_total)
        report(epoch, total.item(), (right_and_total[0] / right_and_total[1]).item())
    return model.module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset")
    parser.add_argument("--layers", choices=LAYERS, default="torch")
    parser.add_argument("--table", help="node features, such as feat (default: the only table of nodes)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="seeds of all processes together")
    parser.add_argument("--memory", default="500MB", help="memory of the loaders of a process, such as 16GB")
    args = parser.parse_args()
    print(f"training on {args.dataset}", flush=True)

    def report(epoch, loss, accuracy):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, validation accuracy {accuracy:.1%}")

    dist.init_process_group("gloo")
    with gids.distributed.open(args.dataset, memory=args.memory) as source:
        options = {"epochs": args.epochs, "batch_size": args.batch_size, "table": args.table}
        train(source, args.layers, **options, report=report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
