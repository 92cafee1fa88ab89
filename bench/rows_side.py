"""One side of bench/rows.py, in its own process: cold or cached rows, or a pipe of GraphBolt."""

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

import gids
from gids.measure.counters import resident_bytes
from gids.measure.features import map_array
from gids.measure.isolation import serve
from gids.measure.memory_group import limit_own_memory

Config = dict[str, Any]
Read = Callable[[torch.Tensor], torch.Tensor]
Rows = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""(ids, their rows) of each minibatch."""

SMALLEST_BYTES = 256 << 20
TABLE = "_N.feat"


def graphbolt() -> Any:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DGL's own source
        import dgl.graphbolt

        import gids.graphbolt  # noqa: F401
    return dgl.graphbolt


def measure(rows: Rows, seconds: float) -> dict[str, float]:
    """Rows per second and CPU seconds per row. Every row is checked, outside the measured time."""
    count = checking = checking_cpu = 0.0
    begun, cpu_begun = time.perf_counter(), time.process_time()
    for ids, features in rows:
        paused, cpu_paused = time.perf_counter(), time.process_time()
        check(ids, features)
        count += len(ids)
        checking += time.perf_counter() - paused
        checking_cpu += time.process_time() - cpu_paused
        if time.perf_counter() - begun - checking > seconds:
            break
    elapsed = time.perf_counter() - begun - checking
    cpu = time.process_time() - cpu_begun - checking_cpu
    return {"rows_per_s": count / elapsed, "cpu_s_per_row": cpu / count}


def check(ids: torch.Tensor, features: torch.Tensor) -> None:
    """Row i must hold i everywhere."""
    if not torch.equal(features, ids[:, None].float().expand_as(features)):
        raise AssertionError("a row differs from the source")


def open_source(
    config: Config, *, cache_bytes: int | None = None, memory_bytes: int | None = None
) -> gids.Source:
    return gids.open(
        config["dataset"],
        memory=memory_bytes,
        threads=config["threads"],
        heat="auto" if cache_bytes is None else "none",
        tuning=gids.Tuning(cache=cache_bytes),
    )


def stock_features(config: Config) -> Any:
    """The feature as OnDiskDataset makes it from ``in_memory: false``."""
    gb = graphbolt()
    options = {"domain": "node", "name": "feat", "format": "numpy", "in_memory": False}
    return gb.TorchBasedFeatureStore([gb.OnDiskFeatureData(path=config["npy"], **options)])


def load_newest(config: Config) -> None:
    torch.ops.load_library(f"{config['newest']}/graphbolt_newest.so")
    sys.path.append(config["newest"])


def read_mapped(config: Config) -> Read:
    table = gids.FeatureStore(config["dataset"]).table(TABLE)
    features = map_array(table, random_access=config["advised"])
    return lambda ids: features[ids]


def read_gids(config: Config) -> Read:
    graphbolt()
    return gids.graphbolt.Feature(open_source(config, cache_bytes=0), TABLE).read


def read_stock(config: Config) -> Read:
    store = stock_features(config)
    return lambda ids: store.read("node", None, "feat", ids)


def read_newest(config: Config) -> Read:
    graphbolt()
    load_newest(config)
    shape = [config["rows"], config["dim"]]
    array = torch.ops.graphbolt.ondisk_npy_array(config["npy"], torch.float32, shape, config["threads"])
    return lambda ids: array.index_select(ids).wait()


def load(config: Config, minibatches: list[torch.Tensor]) -> Rows:
    with gids.FeatureLoader(open_source(config, cache_bytes=0), [TABLE]) as loader:
        for ids, features in loader.attach(minibatches, lambda ids: {TABLE: ids}):
            yield ids, features[TABLE]


def reads(config: Config) -> Rows:
    order = np.random.default_rng(config["seed"]).permutation(config["rows"])  # each row once: all are cold
    minibatches = list(torch.from_numpy(order).split(config["batch"]))
    if config["side"] == "gids_loader":
        return load(config, minibatches)
    if config["side"] == "gids_fetch":
        gb = graphbolt()
        from torch.utils.data.datapipes.iter import IterableWrapper

        made = (gb.MiniBatch(input_nodes=ids) for ids in minibatches)  # each is dropped with its features
        source = open_source(config, cache_bytes=0)
        stage = IterableWrapper(made, deepcopy=False).gids_fetch(source, ["feat"])
        return ((each.input_nodes, each.node_features["feat"]) for each in stage)
    readers = {"mapped": read_mapped, "gids": read_gids, "graphbolt": read_stock, "newest": read_newest}
    read = readers[config["side"]](config)
    return ((ids, read(ids)) for ids in minibatches)


def pipe(config: Config, memory_bytes: int) -> Rows:
    gb, arrays = graphbolt(), np.load(config["graph"])
    graph = gb.fused_csc_sampling_graph(*(torch.from_numpy(arrays[name]) for name in ("indptr", "indices")))
    seeds = np.random.default_rng(config["seed"]).permutation(config["rows"])[: 256 * config["batches"]]
    items = gb.ItemSet(torch.from_numpy(seeds), names="seed_nodes")
    sampled = gb.ItemSampler(items, batch_size=256).sample_neighbor(graph, [5, 5])
    if config["side"] == "gids":
        fetched = sampled.gids_fetch(open_source(config, memory_bytes=memory_bytes), ["feat"])
    else:
        fetched = sampled.fetch_feature(stock_features(config), ["feat"])
    return ((each.input_nodes, each.node_features["feat"]) for each in gb.DataLoader(fetched))


def cached(config: Config) -> tuple[Read, Callable[[Iterator[torch.Tensor]], Rows], Callable[[], int]]:
    """Return three functions: read ids through a cache in memory, stream minibatches, count missed rows."""
    graphbolt()
    if config["side"] == "gids":
        source = open_source(config, cache_bytes=config["cache_bytes"])
        feature = gids.graphbolt.Feature(source, TABLE)
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
    fallback = read_stock(config)

    def read(ids: torch.Tensor) -> torch.Tensor:
        """As CPUCachedFeature.read."""
        return cache.query_and_replace(ids.cpu(), fallback, 0).to(ids.device)

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


def hits(config: Config) -> dict[str, float]:
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


def work(config: Config) -> dict[str, float]:
    torch.set_num_threads(config["threads"])
    if config["side"] == "newest":
        torch.set_num_interop_threads(config["interop_threads"])  # which it reads, queries and copies with
    if config["what"] == "hits":
        return hits(config)
    if config["side"] not in ("gids_loader", "mapped"):
        graphbolt()  # before the memory in use is counted
    memory_bytes = max(SMALLEST_BYTES, config["rows"] * config["dim"])  # a quarter of float32
    if config["limited"]:
        limit_own_memory(resident_bytes("VmRSS") + memory_bytes)
    rows = reads(config) if config["what"] == "reads" else pipe(config, int(0.9 * memory_bytes))
    return measure(rows, config["seconds"])


if __name__ == "__main__":
    sys.exit(serve(work))
