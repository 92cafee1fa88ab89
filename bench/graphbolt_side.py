"""One side of bench/graphbolt.py, in its own process: cold or cached rows by a feature, or a pipe."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from aggregation_side import SMALLEST_BYTES, check, measure
from torch.utils.data.datapipes.iter import IterableWrapper

import gids
from gids.measure.counters import resident_bytes
from gids.measure.isolation import serve
from gids.measure.memory_group import limit_own_memory

os.environ.setdefault("DGLBACKEND", "pytorch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of DGL's own source
    import dgl.graphbolt as gb

    import gids.graphbolt

Read = Callable[[torch.Tensor], torch.Tensor]
Rows = Iterator[tuple[torch.Tensor, torch.Tensor]]


def stock_features(config: dict[str, Any]) -> Any:
    """The feature as OnDiskDataset makes it from ``in_memory: false``."""
    data = gb.OnDiskFeatureData(
        domain="node", name="feat", format="numpy", path=config["npy"], in_memory=False
    )
    return gb.TorchBasedFeatureStore([data])


def load_newest(config: dict[str, Any]) -> None:
    torch.ops.load_library(f"{config['newest']}/graphbolt_newest.so")
    sys.path.append(config["newest"])


def reader(config: dict[str, Any]) -> Read:
    if config["side"] == "gids":
        feature = gids.graphbolt.Feature(
            gids.open(config["dataset"], heat="none", threads=config["threads"], tuning=gids.Tuning(cache=0)),
            "_N.feat",
        )
        return feature.read
    if config["side"] == "graphbolt":
        store = stock_features(config)
        return lambda ids: store.read("node", None, "feat", ids)
    load_newest(config)
    array = torch.ops.graphbolt.ondisk_npy_array(
        config["npy"], torch.float32, [config["rows"], config["dim"]], config["threads"]
    )
    return lambda ids: array.index_select(ids).wait()


def reads(config: dict[str, Any]) -> Rows:
    order = np.random.default_rng(config["seed"]).permutation(config["rows"])  # each row once: all are cold
    minibatches = list(torch.from_numpy(order).split(config["batch"]))
    if config["side"] == "gids_fetch":
        made = (gb.MiniBatch(input_nodes=ids) for ids in minibatches)  # each is dropped with its features
        stage = IterableWrapper(made, deepcopy=False).gids_fetch(
            gids.open(config["dataset"], heat="none", threads=config["threads"], tuning=gids.Tuning(cache=0)),
            ["feat"],
        )
        return ((each.input_nodes, each.node_features["feat"]) for each in stage)
    read = reader(config)
    return ((ids, read(ids)) for ids in minibatches)


def pipe(config: dict[str, Any], memory_bytes: int) -> Rows:
    arrays = np.load(config["graph"])
    graph = gb.fused_csc_sampling_graph(*(torch.from_numpy(arrays[name]) for name in ("indptr", "indices")))
    seeds = np.random.default_rng(config["seed"]).permutation(config["rows"])[: 256 * config["batches"]]
    items = gb.ItemSet(torch.from_numpy(seeds), names="seed_nodes")
    sampled = gb.ItemSampler(items, batch_size=256).sample_neighbor(graph, [5, 5])
    if config["side"] == "gids":
        fetched = sampled.gids_fetch(
            gids.open(config["dataset"], memory=memory_bytes, threads=config["threads"]),
            ["feat"],
        )
    else:
        fetched = sampled.fetch_feature(stock_features(config), ["feat"])
    return ((each.input_nodes, each.node_features["feat"]) for each in gb.DataLoader(fetched))


def cached(
    config: dict[str, Any],
) -> tuple[Read, Callable[[Iterator[torch.Tensor]], Rows], Callable[[], int]]:
    """Return three functions: read ids through a cache in memory, stream minibatches, count missed rows."""
    if config["side"] == "gids":
        feature = gids.graphbolt.Feature(
            gids.open(
                config["dataset"],
                heat="none",
                threads=config["threads"],
                tuning=gids.Tuning(cache=config["cache_bytes"]),
            ),
            "_N.feat",
        )
        return feature.read, one_by_one(feature.read), lambda: feature.feature_loader.stats()["misses"]
    if config["side"] == "torch":
        rows = torch.from_numpy(np.load(config["npy"], mmap_mode="r")[: config["cached_rows"]].copy())

        def select(ids: torch.Tensor) -> torch.Tensor:
            return torch.index_select(rows, 0, ids)

        return select, one_by_one(select), lambda: 0
    load_newest(config)
    from cpu_feature_cache import CPUFeatureCache  # DGL's own file

    shape = config["cache_bytes"] // (4 * config["dim"]), config["dim"]
    cache = CPUFeatureCache(shape, torch.float32, config["policy"])
    fallback = stock_features(config)

    def read(ids: torch.Tensor) -> torch.Tensor:
        """As CPUCachedFeature.read."""

        def read_missing(missing: torch.Tensor) -> torch.Tensor:
            return fallback.read("node", None, "feat", missing)

        return cache.query_and_replace(ids.cpu(), read_missing, 0).to(ids.device)

    stream = partial(overlapped, cache) if config["overlapped"] else one_by_one(read)
    return read, stream, lambda: cache.total_miss


def one_by_one(read: Read) -> Callable[[Iterator[torch.Tensor]], Rows]:
    return lambda minibatches: ((ids, read(ids)) for ids in minibatches)


def overlapped(cache: Any, minibatches: Iterator[torch.Tensor]) -> Rows:
    """As CPUCachedFeature.read_async where all are hits: the next query runs while rows are copied."""
    policy, rows = cache._policy, cache._cache
    ids = next(minibatches)
    queried = policy.query_and_replace_async(ids, 0)
    try:
        for following in minibatches:
            positions, index, pointers, missing, offsets, _ = queried.wait()
            assert not len(missing), "all were hits"
            copied = rows.query_async(positions, index, len(ids))
            queried = policy.query_and_replace_async(following, 0)
            values = copied.wait()
            policy.reading_completed_async(pointers, offsets).wait()
            yield ids, values
            ids = following
    finally:
        queried.wait()  # before the cache is freed
        time.sleep(0.1)  # the pool's threads need the interpreter to free tensors


def hits(config: dict[str, Any]) -> dict[str, float]:
    """Warm the cache up with all rows, then read them in minibatches in random order, again and again."""
    rows, batch = config["cached_rows"], config["batch"]
    order = np.random.default_rng(config["seed"]).permutation(rows)[: rows - rows % batch]
    read, stream, misses = cached(config)
    for ids in torch.arange(rows).split(batch):
        check(ids, read(ids))
    missed = misses()
    measured = measure(stream(cycle(torch.from_numpy(order).split(batch))), config["seconds"])
    assert misses() == missed, "all were hits"
    return measured


def work(config: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(config["threads"])
    if config["side"] == "newest":
        torch.set_num_interop_threads(config["interop_threads"])  # which it reads, queries and copies with
    if config["what"] == "hits":
        return hits(config)
    memory_bytes = max(SMALLEST_BYTES, config["rows"] * config["dim"])  # a quarter of float32
    if config["limited"]:
        limit_own_memory(resident_bytes("VmRSS") + memory_bytes)
    fetched = reads(config) if config["what"] == "reads" else pipe(config, int(0.9 * memory_bytes))
    return measure(fetched, config["seconds"])


if __name__ == "__main__":
    sys.exit(serve(work))
