"""Temporal link prediction in plain PyTorch: what does a user buy next? No minibatch sees the future.

Write a small synthetic shop (or convert a dataset with times, see docs/datasets.md), then train:

    python docs/examples/temporal_links.py shop.gids --make

In the shop a user's interest changes with time, so that the latest purchases tell the next one. Purchases are
edges with times. Every purchase is predicted from the edges before it, which the script asserts.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gids
from gids.write import DatasetWriter, edge_list

BUYS, BOUGHT = ("user", "buys", "item"), ("item", "rev_buys", "user")


def make_shop(path, users=400, items=300, topics=10, purchases=20_000):
    """Write a dataset. A user stays with a topic for 25 purchases on average."""
    rng = np.random.default_rng(0)
    interest = rng.integers(0, topics, users)
    topic_of = np.arange(items) % topics
    by_topic = [np.flatnonzero(topic_of == topic) for topic in range(topics)]
    user, item = rng.integers(0, users, purchases), np.empty(purchases, np.int64)
    for time in range(purchases):
        if rng.random() < 0.04:
            interest[user[time]] = rng.integers(0, topics)
        item[time] = rng.choice(by_topic[interest[user[time]]])
    features = np.eye(topics)[topic_of] + rng.normal(0, 0.3, (items, topics))
    with DatasetWriter(path) as writer:
        writer.write_table("node", "user", "feat", np.ones((users, topics), np.float32))
        writer.write_table("node", "item", "feat", features.astype(np.float32))
        times = np.arange(purchases)
        writer.write_edges(BUYS, edge_list(user, item, num_src=users, num_dst=items), times=times)
        writer.write_edges(BOUGHT, edge_list(item, user, num_src=items, num_dst=users), times=times)


class Layer(nn.Module):
    """Each node's own row and, by relation, the mean of its neighbors' rows, each times a matrix."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.own = nn.ModuleDict({ntype: nn.Linear(in_dim, out_dim) for ntype in ("user", "item")})
        self.neighbors = nn.ModuleDict({r[1]: nn.Linear(in_dim, out_dim) for r in (BUYS, BOUGHT)})

    def forward(self, blocks, x):
        out = {}
        for (source, name, destination), block in blocks.items():
            src, dst = block.coo()
            rows = x[source][src]
            total = rows.new_zeros(block.num_dst, rows.shape[1]).index_add_(0, dst, rows)
            mean = total / block.indptr.diff().clamp(min=1)[:, None]
            own = self.own[destination](x[destination][: block.num_dst])
            out[destination] = own + self.neighbors[name](mean)
        return out


class Model(nn.Module):
    def __init__(self, in_dim, hidden_dim):
        super().__init__()
        self.layers = nn.ModuleList([Layer(in_dim, hidden_dim), Layer(hidden_dim, hidden_dim)])

    def forward(self, minibatch):
        """The dot product of user and item of each purchase, then of each negative."""
        x = {ntype: minibatch.features[f"{ntype}.feat"] for ntype in ("user", "item")}
        x = self.layers[0](minibatch.blocks[0], x)
        x = self.layers[1](minibatch.blocks[1], {ntype: rows.relu() for ntype, rows in x.items()})
        users, items = minibatch.pairs  # rows of minibatch.seeds
        return (x["user"][users] * x["item"][items]).sum(1)


def assert_no_future(minibatch):
    """Assert that edges are earlier than the purchase that they are sampled for. Returns their number."""
    seed_times = minibatch.times  # by node type; trees are numbered type after type, in this order
    of_trees = torch.cat([seed_times[ntype] for ntype in minibatch.batch if ntype in seed_times])
    count = 0
    for layer in minibatch.blocks:
        for (_, _, destination), block in layer.items():
            trees = minibatch.batch[destination][block.coo()[1]]
            edge_times = torch.from_numpy(block.graph.edge_times[block.positions.numpy()])
            assert (edge_times <= of_trees[trees]).all()  # these are the purchases' times less 1
            count += block.num_edges
    return count


@torch.no_grad()
def accuracy(model, loader):
    """The share of purchases that score higher than their negatives: 50 % by chance."""
    right = total = 0
    for minibatch in loader:
        purchases, negatives = model(minibatch).chunk(2)
        right += (purchases > negatives).sum().item()
        total += len(purchases)
    return right / total


parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--make", action="store_true", help="write a synthetic dataset there first")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--memory", default="1GB", help="memory of the loaders, such as 16GB")
args = parser.parse_args()
print(f"training on {args.dataset}", flush=True)

if args.make:
    make_shop(args.dataset)
source = gids.open(args.dataset, memory=args.memory)
graph = source.store.graph(BUYS)
destinations = np.repeat(np.arange(graph.num_dst), np.diff(graph.indptr))
order = np.argsort(graph.edge_times, kind="stable")
edges = torch.from_numpy(np.stack([graph.indices, destinations])[:, order])
times = torch.from_numpy(graph.edge_times[order].astype(np.int64))
train_count = len(times) * 4 // 5  # train on the past, validate on what comes after it


def loader_of(part, **options):
    # An edge of the same time is not later, so times - 1 leaves out the purchase itself.
    return gids.EdgeLoader(
        source,
        edges[:, part],
        [5, 10],
        time=times[part] - 1,
        strategy="last",
        relation=BUYS,
        negatives=1,
        batch_size=args.batch_size,
        **options,
    )


train_loader = loader_of(slice(None, train_count), shuffle=True)
val_loader = loader_of(slice(train_count, None))
model = Model(source.table("item.feat").shape[0], 32)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

for epoch in range(args.epochs):
    losses, checked = [], 0
    for minibatch in train_loader:
        checked += assert_no_future(minibatch)
        loss = binary_cross_entropy_with_logits(model(minibatch), minibatch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"epoch {epoch}: minibatch {len(losses)} of {len(train_loader)}", flush=True)
    mean_loss = sum(losses) / len(losses)
    print(f"{checked} edges, none of the future")
    print(f"epoch {epoch}: loss {mean_loss:.3f}, validation accuracy {accuracy(model, val_loader):.1%}")
