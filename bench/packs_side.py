"""One side of bench/packs.py or bench/pack_versions.py, in its own process: loads some minibatches, cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import gids
from gids.bench.features import KeptRows, map_array
from gids.bench.isolation import (
    cached_share,
    cpu_seconds,
    device_bytes_read,
    limit_own_memory,
    resident_bytes,
)
from gids.store import FeatureStore, Table

TRIAL_BATCHES = 4
MARGIN, MARGIN_BYTES = 0.25, 48 << 20  # later minibatches are larger, and memory gets fragmented


@contextmanager
def gids_rows(config: dict[str, Any], store: FeatureStore, table: Table, ids: torch.Tensor) -> Iterator[Any]:
    """Through NodeLoader with one of the values of reads. Yields (minibatches of an epoch, stats)."""
    options = {"memory": config["memory_bytes"], "reads": config["side"], "scratch": config.get("scratch")}
    with (
        gids.open(store, **options) as source,
        gids.NodeLoader(source, ids, config["fanouts"], tables=[table.name], **sampling(config)) as loader,
    ):
        yield lambda: ((m.input_nodes, m.features[table.name]) for m in loader), loader.stats


@contextmanager
def torch_rows(config: dict[str, Any], store: FeatureStore, table: Table, ids: torch.Tensor) -> Iterator[Any]:
    """torch.index_select on the mapped table, minibatches as gids samples them."""
    features = map_array(table, random_access=True)
    loader = gids.NodeLoader(store, ids, config["fanouts"], tables=[], labels=False, **sampling(config))
    yield lambda: ((m.input_nodes, features.index_select(0, m.input_nodes)) for m in loader), dict


@contextmanager
def dgl_rows(config: dict[str, Any], store: FeatureStore, table: Table, ids: torch.Tensor) -> Iterator[Any]:
    """DGL's DataLoader and NeighborSampler; the mapped table is in g.ndata."""
    graph = dgl_graph(store)
    graph.ndata[table.key] = map_array(table, random_access=True)
    loader = dgl_loader(config, graph, ids, [table.key])
    yield lambda: ((nodes, blocks[0].srcdata[table.key]) for nodes, _, blocks in loader), dict


SIDES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("random", "pack", "auto"), gids_rows),
    "torch": torch_rows,
    "dgl": dgl_rows,
}


def sampling(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("batch_size", "seed", "shuffle") if name in config}


def dgl_graph(store: FeatureStore) -> Any:
    from gids.bench.dgl_side import load_graph  # imports DGL, which takes memory

    return load_graph(store)


def dgl_loader(config: dict[str, Any], graph: Any, ids: torch.Tensor, features: list[str]) -> Any:
    import dgl

    dgl.seed(config["seed"])
    sampler = dgl.dataloading.NeighborSampler(config["fanouts"], prefetch_node_feats=features)
    return dgl.dataloading.DataLoader(graph, ids, sampler, batch_size=config["batch_size"])


def trial(config: dict[str, Any], store: FeatureStore, ids: torch.Tensor) -> int:
    """Sample some minibatches without features, which also warms up. Returns the most rows of one."""
    if config["side"] == "dgl":
        loader = dgl_loader(config, dgl_graph(store), ids, [])
        return max(len(nodes) for nodes, _, _ in islice(loader, TRIAL_BATCHES))
    loader = gids.NodeLoader(store, ids, config["fanouts"], tables=[], labels=False, **sampling(config))
    return max(len(minibatch.input_nodes) for minibatch in islice(loader, TRIAL_BATCHES))


def limit(config: dict[str, Any], store: FeatureStore, table: Table, ids: torch.Tensor) -> None:
    """Limit this process to memory_bytes for features, beside what sampling needs.

    Sides of gids have their outputs within memory_bytes; the others get two minibatches of rows more.
    """
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    rows = trial(config, store, ids)
    headroom = int((1 + MARGIN) * (resident_bytes("VmHWM") - before)) + MARGIN_BYTES
    if config["side"] in ("torch", "dgl"):
        headroom += 2 * rows * table.row_bytes
    topology = store.graph()
    headroom += topology.indptr.nbytes + topology.indices.nbytes  # in the page cache, or a copy for DGL
    limit_own_memory(headroom + config["memory_bytes"])


def file_bytes_written() -> int | None:
    """Bytes that this process wrote to files; some may never reach the disk. None: hidden."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # some containers hide it
        return None
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def counters(stats: dict[str, Any]) -> dict[str, Any]:
    """What counts up in this process. stats: of the loader, {} without gids."""
    packs = stats.get("packs", {})
    return {
        "seconds": time.perf_counter(),
        "cpu_s": cpu_seconds(),
        "read_bytes": device_bytes_read(),
        "file_bytes": file_bytes_written(),
        "packs_read_bytes": packs.get("bytes_read", 0),
        "written_bytes": packs.get("bytes_written", 0),
    }


def run_epoch(minibatches: Any, stats: Any, kept: KeptRows, before: dict[str, Any]) -> dict[str, Any]:
    """Load the minibatches. Returns what happened since `before`, of counters().

    late_s: seconds per minibatch in the second half of them, when the page cache is full.
    """
    rows, ends = 0, [0.0]  # ends: seconds until each minibatch
    for nodes, features in minibatches:
        ends.append(time.perf_counter() - before["seconds"])
        rows += len(nodes)
        kept.add(nodes, features)
    after, batches = counters(stats()), len(ends) - 1
    return {
        **{name: None if value is None else value - before[name] for name, value in after.items()},
        "first_s": ends[1],
        "late_s": (ends[-1] - ends[batches // 2]) / (batches - batches // 2),
        "batches": batches,
        "rows": rows,
    }


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Load config["epochs"] epochs, or one, of config["batches"] minibatches.

    The first epoch's time is from opening the features. Returns what run_epoch does of it, with those of the
    others as "later".
    """
    store = FeatureStore(config["dataset"])
    [ntype] = store.node_types
    table = store.table(config["table"])
    generator = torch.Generator().manual_seed(config["seed"])
    ids = torch.randperm(store.num_nodes(ntype), generator=generator)
    ids = ids[: config["batches"] * config["batch_size"]]
    epoch_count = config.get("epochs", 1)
    kept = KeptRows(epoch_count * config["batches"], table)
    cached_before = max(map(cached_share, table.shard_paths))
    if config.get("limited"):
        limit(config, store, table, ids)
    else:
        trial(config, store, ids)
    before = counters({})
    with SIDES[config["side"]](config, store, table, ids) as (minibatches, stats):
        first = run_epoch(minibatches(), stats, kept, before)
        later = [run_epoch(minibatches(), stats, kept, counters(stats())) for _ in range(epoch_count - 1)]
        packs = stats().get("packs", {})
    compared, wrong = kept.compare(table.read_rows)
    return {
        **first,
        "later": later,
        "choices": packs.get("choices", []),
        "cached_before": cached_before,
        "compared_rows": compared,
        "wrong_rows": wrong,
        "gids": str(Path(gids.__file__).parent),
    }
