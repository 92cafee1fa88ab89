"""One side of bench/rows.py, in its own process: cold rows, or a pipe of GraphBolt."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import gids
from gids.bench.features import map_array
from gids.bench.isolation import limit_own_memory, resident_bytes

Config = dict[str, Any]
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
        if not torch.equal(features, ids[:, None].float().expand_as(features)):
            raise AssertionError("a row differs from the source: row i must hold i everywhere")
        count += len(ids)
        checking += time.perf_counter() - paused
        checking_cpu += time.process_time() - cpu_paused
        if time.perf_counter() - begun - checking > seconds:
            break
    elapsed = time.perf_counter() - begun - checking
    cpu = time.process_time() - cpu_begun - checking_cpu
    return {"rows_per_s": count / elapsed, "cpu_s_per_row": cpu / count}


def open_source(config: Config, **options: Any) -> gids.Source:
    return gids.open(config["dataset"], threads=config["threads"], **options)


def uncached(config: Config) -> gids.Source:
    return open_source(config, heat="none", tuning=gids.Tuning(cache=0))


def stock_features(config: Config) -> Any:
    """The feature as OnDiskDataset makes it from ``in_memory: false``."""
    gb = graphbolt()
    options = {"domain": "node", "name": "feat", "format": "numpy", "in_memory": False}
    return gb.TorchBasedFeatureStore([gb.OnDiskFeatureData(path=config["npy"], **options)])


def reads(config: Config) -> Rows:
    order = np.random.default_rng(config["seed"]).permutation(config["rows"])  # each row once: all are cold
    minibatches = torch.from_numpy(order).split(config["batch"])
    if config["side"] == "gids_loader":
        with gids.FeatureLoader(uncached(config), [TABLE]) as loader:
            for ids, features in loader.attach(minibatches, lambda ids: {TABLE: ids}):
                yield ids, features[TABLE]
        return
    if config["side"] == "mapped":
        mapped = map_array(gids.FeatureStore(config["dataset"]).table(TABLE), random_access=config["advised"])
        read = mapped.__getitem__
    elif config["side"] == "gids":
        read = gids.graphbolt.Feature(uncached(config), TABLE).read
    else:
        store = stock_features(config)

        def read(ids: torch.Tensor) -> Any:
            return store.read("node", None, "feat", ids)

    for ids in minibatches:
        yield ids, read(ids)


def pipe(config: Config, memory_bytes: int) -> Rows:
    gb, arrays = graphbolt(), np.load(config["graph"])
    graph = gb.fused_csc_sampling_graph(*(torch.from_numpy(arrays[name]) for name in ("indptr", "indices")))
    seeds = np.random.default_rng(config["seed"]).permutation(config["rows"])[: 256 * config["batches"]]
    items = gb.ItemSet(torch.from_numpy(seeds), names="seed_nodes")
    sampled = gb.ItemSampler(items, batch_size=256).sample_neighbor(graph, [5, 5])
    if config["side"] == "gids":
        fetched = sampled.gids_fetch(open_source(config, memory=memory_bytes), ["feat"])
    else:
        fetched = sampled.fetch_feature(stock_features(config), ["feat"])
    return ((each.input_nodes, each.node_features["feat"]) for each in gb.DataLoader(fetched))


def run(config: Config) -> dict[str, float]:
    torch.set_num_threads(config["threads"])
    if "npy" in config:
        graphbolt()  # before the memory in use is counted
    memory_bytes = max(SMALLEST_BYTES, config["rows"] * config["dim"])  # a quarter of float32
    if config["limited"]:
        limit_own_memory(resident_bytes("RssFile") + memory_bytes)
    rows = pipe(config, int(0.9 * memory_bytes)) if config.get("pipe") else reads(config)
    return measure(rows, config["seconds"])
