"""One step of bench/full_size.py, in its own process: writes the dataset, or loads minibatches, cold."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from packs_side import counters, dgl_graph
from sage import Training

import gids
from gids.bench.features import map_array
from gids.bench.isolation import cached_share, limit_own_memory, resident_bytes
from gids.convert.synthetic import FIVE_RELATIONS, Features, GraphSpec, draw_nodes, write_dataset
from gids.io import drop_page_cache
from gids.sizes import parse_bytes
from gids.store import FeatureStore

SPARE_BYTES = 2 << 30  # of a peer, for sampling and outputs
ONE_IN = 1000  # rows are compared
_POLL_S = 0.05

Config = Mapping[str, Any]
ByType = dict[str, torch.Tensor]
Side = Iterator[tuple[Iterator[tuple[ByType, ByType, Any]], Callable[[], dict[str, Any]]]]
"""Minibatches: input nodes and their rows by node type, and the minibatch; and stats()."""


def own_bytes() -> int:
    """Memory of this process, without mapped files."""
    return resident_bytes("RssAnon") + resident_bytes("RssShmem")


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """A list whose only item becomes the most own_bytes()."""
    most, ended = [0], threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_S):
            most[0] = max(most[0], own_bytes())

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def generate(config: Config) -> dict[str, Any]:
    """Write the dataset. Returns the seconds in all, and those of features and of edges."""
    ends: dict[str, float] = {}  # of the features and edges of each type, one after the other

    def progress(what: str, _: float) -> None:
        ends[what] = time.perf_counter()

    relations, begun = FIVE_RELATIONS if config["typed"] else (), time.perf_counter()
    with peak_of_memory() as peak:
        path = write_dataset(
            config["dataset"], GraphSpec(**config["spec"]), relations=relations, progress=progress
        )
    seconds, store = time.perf_counter() - begun, FeatureStore(path)
    spent = dict(zip(ends, np.diff([begun, *ends.values()]).tolist(), strict=True))
    return {
        "seconds": seconds,
        "features_s": sum(s for what, s in spent.items() if what.endswith("features")),
        "edges_s": sum(s for what, s in spent.items() if what.endswith("edges")),
        "edges": sum(map(store.num_edges, store.relations)),
        "feature_bytes": sum(table.row_count * table.row_bytes for table in store.tables.values()),
        "peak_bytes": peak[0],
    }


def by_type(store: FeatureStore, values: Any) -> ByType:
    """What a minibatch has by node type; a tensor if there is one type."""
    return dict(values) if isinstance(values, Mapping) else {store.node_types[0]: values}


@contextmanager
def gids_rows(config: Config, store: FeatureStore, seeds: Any) -> Side:
    names = {table.type: name for name, table in store.tables.items()}
    options = {name: config[name] for name in ("memory", "reads", "scratch_bytes")}
    sampling = {"batch_size": config["batch_size"], "seed": 0}
    with (
        gids.open(store, **options) as source,
        gids.NodeLoader(source, seeds, config["fanouts"], **sampling) as loader,
    ):
        pairs = ((by_type(store, m.input_nodes), m) for m in loader)
        yield ((n, {t: m.features[names[t]] for t in n}, m) for n, m in pairs), loader.stats


@contextmanager
def torch_rows(config: Config, store: FeatureStore, seeds: Any) -> Side:
    """Minibatches as gids samples them."""
    features = {table.type: map_array(table, random_access=True) for table in store.tables.values()}
    sampling = {"batch_size": config["batch_size"], "seed": 0, "tables": [], "labels": False}
    with gids.NodeLoader(store, seeds, config["fanouts"], **sampling) as loader:
        pairs = ((by_type(store, m.input_nodes), m) for m in loader)
        yield ((n, {t: features[t][ids] for t, ids in n.items()}, m) for n, m in pairs), dict


@contextmanager
def dgl_rows(config: Config, store: FeatureStore, seeds: Any) -> Side:
    """DGL's loader and sampler."""
    import dgl

    graph, key = config["graph"], "feat"
    for table in store.tables.values():
        graph.nodes[table.type].data[key] = map_array(table, random_access=True)
    wanted = {ntype: [key] for ntype in store.node_types} if config["typed"] else [key]
    sampler = dgl.dataloading.NeighborSampler(config["fanouts"], prefetch_node_feats=wanted)
    loader = dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=config["batch_size"])
    with warnings.catch_warnings(action="ignore"):  # its advice on the affinity of threads
        pairs = ((by_type(store, nodes), blocks[0].srcnodes) for nodes, _, blocks in loader)
    yield ((n, {t: of[t].data[key] for t in n}, None) for n, of in pairs), dict


SIDES: dict[str, Callable[..., Any]] = {"torch": torch_rows, "dgl": dgl_rows}


def seeds_of(config: Config, store: FeatureStore) -> Any:
    """The seeds of config["batches"] minibatches, in random order; of papers if there are two types."""
    ids = store.split("train", "paper" if config["typed"] else None)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(config["spec"]["seed"]))
    chosen = ids[order[: config["batches"] * config["batch_size"]]]
    return {"paper": chosen} if config["typed"] else chosen


def differing(features: Features, ids: torch.Tensor, rows: torch.Tensor) -> int:
    """The number of rows that differ from the formula, in a bit."""
    right = features.of(ids.numpy()).to(rows.dtype)
    return int((rows.contiguous().view(torch.uint8) != right.view(torch.uint8)).any(1).sum())


def load(config: Config) -> dict[str, Any]:
    """Load minibatches, peers for most_seconds. The time is from opening the features."""
    store, spec, side = FeatureStore(config["dataset"]), GraphSpec(**config["spec"]), config["side"]
    features = {ntype: nodes.features for ntype, nodes in draw_nodes(spec, typed=config["typed"])}
    seeds, graphs = seeds_of(config, store), [store.graph(relation) for relation in store.relations]
    topology_bytes = sum(graph.indptr.nbytes + graph.indices.nbytes for graph in graphs)
    if side == "dgl":
        config, topology_bytes = {**config, "graph": dgl_graph(store)}, 0
    hidden = [config["hidden"]] * (len(config["fanouts"]) - 1)
    training = None
    if config["hidden"]:
        training = Training([spec.dim, *hidden, spec.classes], seed=spec.seed, rate=0.001)
    drop_page_cache(config["dataset"])
    cached = max(cached_share(path) for table in store.tables.values() for path in table.shard_paths)
    if side in SIDES and config["limited"]:
        limit_own_memory(parse_bytes(config["memory"]) + SPARE_BYTES + topology_bytes)
    took: dict[str, Any] = dict.fromkeys(("first_s", "batches", "rows", "compared", "wrong", "listed"), 0)
    base, before = own_bytes(), counters({})
    with peak_of_memory() as peak, SIDES.get(side, gids_rows)(config, store, seeds) as (minibatches, stats):
        took["open_s"] = time.perf_counter() - before["seconds"]
        for nodes, rows, minibatch in minibatches:
            spent_s = time.perf_counter() - before["seconds"]
            took["first_s"] = took["first_s"] or spent_s
            took["batches"] += 1
            took["listed"] = max(took["listed"], sum(stats().get("memory", {}).values()))
            for ntype, ids in nodes.items():
                chosen = slice(took["batches"] % min(ONE_IN, max(1, len(ids))), None, ONE_IN)
                took["rows"] += len(ids)
                took["compared"] += len(ids[chosen])
                took["wrong"] += differing(features[ntype], ids[chosen], rows[ntype][chosen])
            if training is not None:
                training.step(
                    minibatch.blocks, *map(torch.Tensor.float, rows.values()), minibatch.labels.long()
                )
            if 0 < config["most_seconds"] < spent_s:
                break
        took["loader"] = stats()
        after = counters(took["loader"])
    spent = {name: None if value is None else value - before[name] for name, value in after.items()}
    return {**took, **spent, "cached": cached, "grown": peak[0] - base}


def run(config: Config) -> dict[str, Any]:
    return (generate if config["side"] == "generate" else load)(config)
