"""The obvious reference of the DGL tests: small graphs with features in memory, and stock DGL over them."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from open_options import take_options

import gids.dgl  # before dgl: makes it importable
from gids.store import FeatureStore
from gids.write import DatasetWriter

import dgl  # isort: skip
from dgl.dataloading import (
    ClusterGCNSampler,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    SAINTSampler,
    ShaDowKHopSampler,
    as_edge_prediction_sampler,
    negative_sampler,
)

SEED = 7


@dataclass
class Dataset:
    """A graph without the stored columns, the same graph with them, and the store."""

    graph: Any
    full: Any
    store: Any
    path: Any
    node_feats: Any  # what samplers ask for: a list, or by type
    edge_feats: Any
    labels: Any
    seeds: Any
    edge_seeds: Any
    columns: dict = field(default_factory=dict)  # (kind, type, key) -> source rows


def homogeneous(directory):
    rng = torch.Generator().manual_seed(SEED)
    n, e = 300, 1800
    src = (torch.rand(e, generator=rng) ** 2 * n).long()
    dst = torch.randint(n, (e,), generator=rng)
    graph = dgl.graph((src, dst), num_nodes=n)
    graph.ndata["label"] = torch.randint(5, (n,), generator=rng)
    columns = {
        ("node", "_N", "feat"): torch.randn(n, 6, generator=rng),
        ("edge", ("_N", "_E", "_N"), "weight"): torch.randn(e, 3, generator=rng).half(),
    }
    return _dataset(
        directory,
        graph,
        columns,
        node_feats=["feat"],
        edge_feats=["weight"],
        labels=["label"],
        seeds=torch.randperm(n, generator=rng)[:100],
        edge_seeds=torch.randperm(e, generator=rng)[:90],
    )


def heterogeneous(directory):
    rng = torch.Generator().manual_seed(SEED)
    counts = {"author": 120, "paper": 200, "venue": 10}
    relations = {
        ("author", "writes", "paper"): 700,
        ("paper", "cites", "paper"): 900,
        ("paper", "in", "venue"): 200,
        ("venue", "has", "paper"): 200,
        ("paper", "by", "author"): 500,
    }
    graph = dgl.heterograph(
        {
            r: (
                torch.randint(counts[r[0]], (e,), generator=rng),
                torch.randint(counts[r[2]], (e,), generator=rng),
            )
            for r, e in relations.items()
        },
        counts,
    )
    graph.nodes["paper"].data["label"] = torch.randint(5, (200,), generator=rng)
    columns = {
        ("node", "paper", "feat"): torch.randn(200, 4, 2, generator=rng),
        ("node", "author", "feat"): torch.randint(255, (120, 5), generator=rng, dtype=torch.uint8),
        ("node", "author", "age"): torch.randn(120, generator=rng).double(),
        ("node", "author", "known"): torch.rand(120, 3, generator=rng) < 0.5,
        ("edge", ("paper", "cites", "paper"), "weight"): torch.randn(900, 3, generator=rng),
    }
    return _dataset(
        directory,
        graph,
        columns,
        node_feats={"paper": ["feat"], "author": ["feat", "age", "known"]},
        edge_feats={("paper", "cites", "paper"): ["weight"]},
        labels={"paper": ["label"]},
        seeds={"paper": torch.arange(0, 200, 3), "author": torch.arange(20)},
        edge_seeds={"cites": torch.arange(0, 900, 13), "writes": torch.arange(0, 700, 17)},
    )


def _dataset(directory, graph, columns, **asked):
    full = graph.clone()
    for (kind, type_, key), rows in columns.items():
        frame = full.nodes[type_].data if kind == "node" else full.edges[type_].data
        frame[key] = rows
    path = directory / "small.gids"
    store = write(path, graph, columns)
    return Dataset(graph=graph, full=full, store=store, path=path, columns=columns, **asked)


def write(path, graph, columns):
    """Store a graph's topology, labels and splits, and columns beside it."""
    with DatasetWriter(path, stripe=2) as writer:
        for node_type in graph.ntypes:
            writer.add_nodes(node_type, graph.num_nodes(node_type))
        for (kind, type_, key), rows in columns.items():
            writer.write_table(kind, type_, key, rows)
        for relation in graph.canonical_etypes:
            indptr, indices, edge_ids = graph.adj_tensors("csc", etype=relation)
            writer.write_graph(relation, indptr, indices, edge_ids=edge_ids)
        for node_type in graph.ntypes:
            if "label" in graph.nodes[node_type].data:
                writer.write_labels(node_type, graph.nodes[node_type].data["label"])
                for split, ids in zip(("train", "val", "test"), torch.arange(60).split(20), strict=True):
                    writer.write_split(node_type, split, ids)
    return FeatureStore(path)


def node_sampler(kind, data):
    """A sampler that yields blocks, and asks for every stored column and the labels."""
    prefetch = {
        "prefetch_labels": data.labels,
        "prefetch_node_feats": data.node_feats,
        "prefetch_edge_feats": data.edge_feats,
    }
    if kind == "full":
        return MultiLayerFullNeighborSampler(2, **prefetch)
    return {"neighbor": NeighborSampler, "labor": LaborSampler}[kind]([3, 4], **prefetch)


def make(kind, data, tmp_path):
    """(indices, sampler) of any DGL sampler, which asks for every stored column."""
    seed_everything()  # DGL's LABOR draws a seed when it is made
    ndata = {"prefetch_ndata": data.node_feats, "prefetch_edata": data.edge_feats}
    if kind in ("neighbor", "labor", "full"):
        return data.seeds, node_sampler(kind, data)
    if kind == "edge":
        return data.edge_seeds, as_edge_prediction_sampler(node_sampler("neighbor", data), exclude="self")
    if kind == "edge-negative":
        sampler = as_edge_prediction_sampler(
            node_sampler("neighbor", data),
            prefetch_labels=data.edge_feats,
            negative_sampler=negative_sampler.Uniform(3),
        )
        return data.edge_seeds, sampler
    if kind == "shadow":
        sampler = ShaDowKHopSampler(
            [3, 4], prefetch_node_feats=data.node_feats, prefetch_edge_feats=data.edge_feats
        )
        return data.seeds, sampler
    if kind == "cluster":
        with (
            warnings.catch_warnings()
        ):  # DGL's partitioning leaves a file open and uses an old NumPy protocol
            warnings.simplefilter("ignore")
            return torch.arange(12), ClusterGCNSampler(data.full, 12, str(tmp_path / "clusters.pkl"), **ndata)
    return torch.arange(8), SAINTSampler(mode=kind.split("-")[1], budget=SAINT_BUDGET[kind], **ndata)


class OwnSampler(dgl.dataloading.Sampler):
    """A sampler of the user's own, which declares nothing. draw: makes a minibatch of the graph and seeds."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def sample(self, g, indices):
        return self.draw(g, indices)


SAINT_BUDGET = {"saint-node": 40, "saint-edge": 40, "saint-walk": (10, 3)}
BLOCK_SAMPLERS = ["neighbor", "labor", "full", "edge", "edge-negative"]
SAMPLERS = [*BLOCK_SAMPLERS, "shadow", "cluster", *SAINT_BUDGET]


def seed_everything():
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002  (DGL shuffles by it)
    dgl.seed(SEED)


def epochs(loader, count=1):
    """Every minibatch of some epochs, kept."""
    seed_everything()
    return [list(loader) for _ in range(count)]


def graphs_in(batch):
    found = []
    dgl.utils.recursive_apply(batch, lambda x: found.append(x) if isinstance(x, dgl.DGLGraph) else None)
    return found


def frames_of(graph):
    nodes = zip(graph.ntypes, graph._node_frames, strict=True)
    edges = zip(graph.canonical_etypes, graph._edge_frames, strict=True)
    yield from (("node", type_, frame) for type_, frame in nodes)
    yield from (("edge", type_, frame) for type_, frame in edges)


def assert_rows_equal_source(batch, data):
    """Every stored column of a minibatch equals the source rows of its own ids. Returns how many."""
    count = 0
    for graph in graphs_in(batch):
        for kind, type_, frame in frames_of(graph):
            for key in list(frame):
                source = data.columns.get((kind, type_, key))
                if source is not None:
                    assert bits(frame[key]) == bits(source[frame[dgl.NID]])
                    count += 1
    return count


def assert_same(ours, stock):
    """Two minibatches agree in structure, graphs and every column, bit for bit."""
    assert type(ours) is type(stock)
    if isinstance(ours, dict):
        assert list(ours) == list(stock)
        for key in ours:
            assert_same(ours[key], stock[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(stock)
        for a, b in zip(ours, stock, strict=True):
            assert_same(a, b)
    elif isinstance(ours, dgl.DGLGraph):
        assert ours.ntypes == stock.ntypes
        assert ours.canonical_etypes == stock.canonical_etypes
        for relation in ours.canonical_etypes:
            assert_same(ours.edges(etype=relation, order="eid"), stock.edges(etype=relation, order="eid"))
        for (_, _, a), (_, _, b) in zip(frames_of(ours), frames_of(stock), strict=True):
            # Stock DGL also passes on, unasked, the stored columns that its graph has in memory.
            assert set(b.keys()) - {"feat", "age", "known", "weight"} <= set(a.keys()) <= set(b.keys())
            for key in list(a):
                assert bits(a[key]) == bits(b[key])
    else:
        assert bits(ours) == bits(stock)


def bits(tensor):
    """What must be equal for two tensors to be the same, NaNs included."""
    flat = tensor.contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def stock_loader(data, indices, sampler, **options):
    return dgl.dataloading.DataLoader(data.full, indices, sampler, **options)


def gids_loader(data, indices, sampler, **options):
    """options: of gids.open() and of the loader."""
    source = gids.open(data.path, **take_options(options))
    return gids.dgl.DataLoader(data.graph, indices, sampler, gids=source, **options)
