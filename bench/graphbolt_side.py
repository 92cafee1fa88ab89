"""One side of bench/graphbolt.py, in a process of its own: cold rows by one feature, or through one pipe."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from aggregation_side import SMALLEST_BYTES, measure
from torch.utils.data.datapipes.iter import IterableWrapper

import gids
from gids.quickstart.counters import resident_bytes
from gids.quickstart.isolation import limit_own_memory, serve

os.environ.setdefault("DGLBACKEND", "pytorch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of DGL's own source
    import dgl.graphbolt as gb

    import gids.graphbolt

Read = Callable[[torch.Tensor], torch.Tensor]


def stock_features(config: dict[str, Any]) -> Any:
    """The feature as OnDiskDataset makes it from ``in_memory: false``."""
    data = gb.OnDiskFeatureData(
        domain="node", name="feat", format="numpy", path=config["npy"], in_memory=False
    )
    return gb.TorchBasedFeatureStore([data])


def reader(config: dict[str, Any]) -> Read:
    if config["side"] == "gids":
        feature = gids.graphbolt.Feature(
            config["dataset"], "_N.feat", cache_bytes=0, heat="none", threads=config["threads"]
        )
        return feature.read
    if config["side"] == "graphbolt":
        store = stock_features(config)
        return lambda ids: store.read("node", None, "feat", ids)
    torch.ops.load_library(config["library"])
    array = torch.ops.gids_graphbolt.ondisk_npy_array(
        config["npy"], torch.float32, [config["rows"], config["dim"]], config["threads"]
    )
    return lambda ids: array.index_select(ids).wait()


def reads(config: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    order = np.random.default_rng(config["seed"]).permutation(config["rows"])  # each row once: all are cold
    minibatches = list(torch.from_numpy(order).split(config["batch"]))
    if config["side"] == "gids_fetch":
        made = (gb.MiniBatch(input_nodes=ids) for ids in minibatches)  # each is dropped with its features
        stage = IterableWrapper(made, deepcopy=False).gids_fetch(
            config["dataset"], ["feat"], cache_bytes=0, heat="none", threads=config["threads"]
        )
        return ((each.input_nodes, each.node_features["feat"]) for each in stage)
    read = reader(config)
    return ((ids, read(ids)) for ids in minibatches)


def pipe(config: dict[str, Any], memory_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    arrays = np.load(config["graph"])
    graph = gb.fused_csc_sampling_graph(*(torch.from_numpy(arrays[name]) for name in ("indptr", "indices")))
    seeds = np.random.default_rng(config["seed"]).permutation(config["rows"])[: 256 * config["batches"]]
    items = gb.ItemSet(torch.from_numpy(seeds), names="seed_nodes")
    sampled = gb.ItemSampler(items, batch_size=256).sample_neighbor(graph, [5, 5])
    if config["side"] == "gids":
        fetched = sampled.gids_fetch(
            config["dataset"], ["feat"], memory_bytes=memory_bytes, threads=config["threads"]
        )
    else:
        fetched = sampled.fetch_feature(stock_features(config), ["feat"])
    return ((each.input_nodes, each.node_features["feat"]) for each in gb.DataLoader(fetched))


def work(config: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(config["threads"])
    if config["side"] == "newest":
        torch.set_num_interop_threads(config["threads"])  # which it reads with
    memory_bytes = max(SMALLEST_BYTES, config["rows"] * config["dim"])  # a quarter of float32
    if config["limited"]:
        limit_own_memory(resident_bytes("VmRSS") + memory_bytes)
    fetched = reads(config) if config["what"] == "reads" else pipe(config, int(0.9 * memory_bytes))
    return measure(fetched, config["seconds"])


if __name__ == "__main__":
    sys.exit(serve(work))
